"""Trained drafters, a draft model or an EAGLE3 head, under the switch: alone, or beside sam."""

"""As a checkout of verl's recipes has it: the folder `recipe` of a run that starts here is a namespace."""

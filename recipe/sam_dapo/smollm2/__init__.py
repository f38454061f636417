"""SmolLM2-135M-Instruct, a real model for CPU machines without a hub: from a registry package, with tasks to solve."""

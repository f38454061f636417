"""The command `python -m sam.switch_cost`: sam.switch.bench."""

from sam.switch.bench import main

if __name__ == "__main__":
    main()

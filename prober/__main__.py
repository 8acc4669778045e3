"""Run the command line with `python -m prober`."""

from prober.cli.main import main

if __name__ == "__main__":
    main()

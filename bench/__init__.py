"""What h3spool costs, as ratios measured in one run. `make bench` runs all, `python -m bench handover` one part."""

"""Lightning modules, data modules and losses."""

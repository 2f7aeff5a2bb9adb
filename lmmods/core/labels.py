"""Labels of a batch, as written by data modules and read by losses."""

IGNORED = -100  # label of a position that no loss counts

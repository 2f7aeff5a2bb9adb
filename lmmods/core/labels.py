"""Labels of a batch, as data modules write and losses read them."""

IGNORED = -100  # label of a position that no loss looks at

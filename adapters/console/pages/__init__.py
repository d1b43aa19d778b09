"""Pages of the console; each module has its `ROUTES`, and a `NAV` entry if the navigation shows it."""

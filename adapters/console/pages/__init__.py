"""Pages of the console; each module defines `ROUTES`, and `NAV` if the navigation lists it."""

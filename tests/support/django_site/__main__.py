"""Commands of the site: `python -m tests.support.django_site DATABASE STORE COMMAND`."""

from tests.support.django_site import main

if __name__ == "__main__":
    main()

"""Ship the orders that are in the mailbox, and exit: a script for cron, or for a shell beside the shop.

python -m docs.examples.web.ship
"""

import os

from postroom import connect

with connect(os.environ.get("SHOP_MAILBOX", "shop.db")) as mailbox:
    while messages := mailbox.receive_messages("orders", visibility_ms=30_000, wait_ms=1_000):
        for message in messages:
            order = message.json()
            print("shipped", order["order"], order["item"], flush=True)
            message.ack()

"""An object store with the API of S3, from the package `moto`; its objects are in memory."""

import sys
from pathlib import Path

from tests.support.servers.process import LOOPBACK, ServerProcess, free_port
from tests.support.servers.server import LoopbackServer

BUCKET = "postroom-test"


class ObjectStoreServer(LoopbackServer):
    """An object store on loopback.

    Arguments:
        folder: of its log.
    """

    def __init__(self, folder: Path) -> None:
        port = free_port()
        command: list[str | Path] = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
        super().__init__(ServerProcess("moto", command, folder / "moto.log"), port)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        """The settings of clients."""

    def start(self) -> None:
        """Start the server, with an empty bucket."""
        super().start()
        import boto3  # takes long to import

        boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="test",
            aws_secret_access_key="test",  # of a server on loopback
            region_name="us-east-1",
        ).create_bucket(Bucket=BUCKET)

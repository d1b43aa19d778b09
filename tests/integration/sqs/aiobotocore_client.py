"""Calls actions by aiobotocore: reads them from standard input, a line each, and prints the answers.

It runs in an environment of its own, as aiobotocore needs another version of botocore than boto3.
"""

import asyncio
import json
import sys

from aiobotocore.session import get_session
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import ClientError


async def main(url: str) -> None:
    """Serve calls until the input ends."""
    options = Config(retries={"total_max_attempts": 1})
    async with get_session().create_client(
        "sqs",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
        config=options,
    ) as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            call = json.loads(line)
            try:
                answer = await getattr(client, xform_name(call["action"]))(**call["parameters"])
                print(json.dumps({"answer": answer}, default=str), flush=True)
            except ClientError as error:
                print(json.dumps({"code": error.response["Error"]["Code"], "text": str(error)}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

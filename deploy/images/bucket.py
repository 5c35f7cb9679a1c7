"""Make the bucket of a storage URI unless it is there: `python -m streamrft.deploy.images.bucket`.

Keys and address come from the environment, as everywhere: AWS_ACCESS_KEY_ID and the like.
"""

from __future__ import annotations

import argparse
import sys

from ...schemas.errors import ConfigError, StorageUnavailable, StreamrftError
from ...streams.blobs import open_storage, storage_errors


def make_bucket(uri: str) -> bool:
    """Whether the bucket of `uri` had to be made. Idempotent.

    Raises:
        ConfigError: no bucket in the URI, or no keys in the environment.
        StorageUnavailable: the store does not answer, or refuses.
    """
    fs, path = open_storage(uri)
    bucket = path.strip("/").split("/", 1)[0]
    if not bucket:
        raise ConfigError(f"{uri}: names no bucket; write s3://BUCKET[/FOLDER].")
    try:
        if fs.exists(bucket):
            return False
        fs.mkdir(bucket)
    except storage_errors() as error:
        raise StorageUnavailable(f"{uri}: bucket {bucket} cannot be made ({error})") from error
    return True


def main() -> int:
    """0 when the bucket is there afterwards."""
    parser = argparse.ArgumentParser(description="Make the bucket of a URI unless it is there.")
    parser.add_argument("uri", help="such as s3://streamrft")
    uri = parser.parse_args().uri
    try:
        made = make_bucket(uri)
    except StreamrftError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{uri}: bucket {'made' if made else 'is there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

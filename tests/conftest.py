"""What several files of tests share: folders local and remote, and an S3 server for them."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from uuid import uuid4

import pytest


@pytest.fixture(scope="session")
def s3_server():
    """URL of an S3 server that is started for these tests and ended after them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, **quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None and time.monotonic() < deadline, "no S3 server"
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """URL of an empty bucket; child processes reach it too."""
    import fsspec

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    bucket = f"bucket-{uuid4().hex}"
    fsspec.filesystem("s3").mkdir(bucket)
    yield f"s3://{bucket}"
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(params=["local", "file", "memory", "s3"])
def anywhere(request, tmp_path):
    """A folder that is not there yet, on each kind of file system."""
    match request.param:
        case "local":
            return str(tmp_path / "new" / "folder")
        case "file":
            return f"file://{tmp_path}/new/folder"
        case "memory":
            return f"memory://{uuid4().hex}/new/folder"
        case "s3":
            return f"{request.getfixturevalue('s3')}/new/folder"

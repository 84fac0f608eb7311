"""A double of an S3 server. It keeps what clients write; the S3 door of a Fletch server answers reads.

    double.py PORT DOOR SERVER WORK

Ceph's s3-tests write a bucket and read it. The double keeps the writes. Before a read it writes the bucket
to a directory, indexes it, and registers it as a dataset of the bucket's name at SERVER. It sends the read on
to DOOR, whose keys begin with `BUCKET@ROOT/`, and takes this prefix out of the answer. It checks no
signature.
"""

import datetime
import http.client
import http.server
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse
import xml.sax.saxutils

import blake3

PORT, DOOR, SERVER, WORK = int(sys.argv[1]), sys.argv[2], sys.argv[3], pathlib.Path(sys.argv[4])
NOW = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
OWNER = "<Owner><ID>testid</ID><DisplayName>M. Tester</DisplayName></Owner>"
# Parameters of reads that name keys of the bucket.
OF_KEYS = ("prefix", "marker", "start-after")
# Elements of answers that name them.
ELEMENTS = "Key|Prefix|Marker|NextMarker|StartAfter"


class Bucket:
    """The objects of a bucket, and the version of its dataset that has them."""

    def __init__(self, name):
        self.name, self.objects, self.root = name, {}, None

    def base(self):
        """Returns what the keys of the bucket begin with at the door, after it was published."""
        if self.root is None:
            tree, tables = WORK / "trees" / self.name, WORK / "tables" / self.name
            shutil.rmtree(tree, ignore_errors=True)
            tree.mkdir(parents=True)
            for key, data in self.objects.items():
                path = f"{tree}/{key}"
                try:
                    if key.endswith("/"):
                        pathlib.Path(path).mkdir(parents=True, exist_ok=True)
                    else:
                        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
                        pathlib.Path(path).write_bytes(data)
                except OSError as error:
                    print(f"no file can have the key {key!r}: {error}", file=sys.stderr)
            options = ["--tables", str(tables), "--quiet"]
            self.root = fletch("index", str(tree), *options).split()[-1] if self.objects else ""
            if self.root:
                fletch("register", self.name, str(tree), "--tables", str(tables), "--server", SERVER)
        return f"{self.name}@{self.root}/" if self.root else f"{self.name}/"


def fletch(*words):
    """Runs a command. Returns what it printed."""
    done = subprocess.run(["fletch", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr}")
    return done.stdout


BUCKETS = {}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        """Sends an answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status, code):
        """Sends an error."""
        self.answer(status, f"<Error><Code>{code}</Code></Error>".encode(), Content_Type="application/xml")

    def asked(self):
        """Returns the bucket's name, the key, the parameters and the body of the request."""
        parts = urllib.parse.urlsplit(self.path)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        query = urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
        length = int(self.headers.get("Content-Length") or 0)
        return bucket, urllib.parse.unquote(key), query, self.rfile.read(length)

    def do_PUT(self):
        bucket, key, query, body = self.asked()
        if not key:
            BUCKETS.setdefault(bucket, Bucket(bucket))
            return self.answer(200)
        if bucket not in BUCKETS:
            return self.error(404, "NoSuchBucket")
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = unchunked(body)
        of = BUCKETS[bucket]
        of.objects[key], of.root = body, None
        return self.answer(200, ETag=f'"{blake3.blake3(body).hexdigest()}"')

    def do_DELETE(self):
        bucket, key, _, _ = self.asked()
        if key and bucket in BUCKETS:
            BUCKETS[bucket].objects.pop(key, None)
            BUCKETS[bucket].root = None
        elif BUCKETS.pop(bucket, None) is None:
            return self.error(404, "NoSuchBucket")
        return self.answer(204)

    def do_POST(self):
        bucket, _, query, body = self.asked()
        if "delete" not in dict(query) or bucket not in BUCKETS:
            return self.error(501, "NotImplemented")
        for key in re.findall(rb"<Key>(.*?)</Key>", body, re.S):
            BUCKETS[bucket].objects.pop(xml.sax.saxutils.unescape(key.decode()), None)
        BUCKETS[bucket].root = None
        return self.answer(200, b"<DeleteResult></DeleteResult>")

    def do_GET(self):
        bucket, key, query, _ = self.asked()
        names = dict(query)
        if not bucket:
            found = "".join(f"<Bucket><Name>{name}</Name><CreationDate>{NOW}</CreationDate>"
                            "</Bucket>" for name in BUCKETS)
            body = f"<ListAllMyBucketsResult>{OWNER}<Buckets>{found}</Buckets></ListAllMyBucketsResult>"
            return self.answer(200, body.encode())
        if "versions" in names and bucket in BUCKETS:
            found = "".join(f"<Version><Key>{urllib.parse.quote(name)}</Key><VersionId>null</VersionId>"
                            "</Version>" for name in BUCKETS[bucket].objects)
            return self.answer(200, ("<ListVersionsResult><IsTruncated>false</IsTruncated>"
                                     "<EncodingType>url</EncodingType>"
                                     f"{found}</ListVersionsResult>").encode())
        return self.send_on(bucket, key, query)

    do_HEAD = do_GET

    def send_on(self, bucket, key, query):
        """Has the door answer a read."""
        base, path = "", f"/{bucket}"
        if bucket in BUCKETS:
            base, path = BUCKETS[bucket].base(), "/fletch"
            if key:
                path += f"/{urllib.parse.quote(base + key)}"
            else:
                query = [(name, base + value if name in OF_KEYS and value else value)
                         for name, value in query]
                if "prefix" not in dict(query) or not dict(query)["prefix"]:
                    query = [pair for pair in query if pair[0] != "prefix"] + [("prefix", base)]
        if query:
            path += "?" + urllib.parse.urlencode(query, quote_via=urllib.parse.quote)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        door = http.client.HTTPConnection(DOOR, timeout=30)
        door.request(self.command, path, headers=headers)
        reply = door.getresponse()
        body = reply.read()
        if not key and reply.status == 200:
            body = self.of_bucket(body.decode(), bucket, base).encode()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("content-length", "date") or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @staticmethod
    def of_bucket(text, bucket, base):
        """Takes the prefix of the dataset out of a listing."""
        for form in (base, urllib.parse.quote(base)):
            text = re.sub(f"<({ELEMENTS})>{re.escape(form)}", r"<\1>", text)
        text = text.replace("<Name>fletch</Name>", f"<Name>{bucket}</Name>")
        return re.sub("<Owner>.*?</Owner>", OWNER, text)


def unchunked(body):
    """Returns the content of a body in signed chunks."""
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        if length == 0:
            break
        out, body = out + body[:length], body[length + 2:]
    return out


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()

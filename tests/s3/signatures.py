"""Requests to the S3 door that must be refused, and what each refusal says. Signed by botocore.

The variables AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL name the door; KEY is a key that
the credentials may read, and FOREIGN one of another domain.
"""

import datetime
import os
import re
import unittest
import urllib.error
import urllib.request

import boto3
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.client import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

ID, SECRET = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
URL, KEY, FOREIGN = os.environ["AWS_ENDPOINT_URL"], os.environ["KEY"], os.environ["FOREIGN"]


def answer(request):
    """Sends a request. Returns the status, and the code of the error."""
    plain = urllib.request.Request(request.url, method=request.method, headers=dict(request.headers.items()))
    try:
        with urllib.request.urlopen(plain) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        found = re.search(rb"<Code>(.*)</Code>", error.read())
        return error.code, found.group(1).decode() if found else ""


def signed(url, identity=ID, secret=SECRET, method="GET", later=0):
    """Returns a request that is signed at a time that is `later` seconds from now."""
    request = AWSRequest(method=method, url=url)
    signer = auth.S3SigV4Auth(Credentials(identity, secret), "s3", "anywhere-7")
    original = auth.get_current_datetime
    auth.get_current_datetime = lambda *args, **kw: original(*args, **kw) + datetime.timedelta(seconds=later)
    try:
        signer.add_auth(request)
    finally:
        auth.get_current_datetime = original
    return request


class Refusals(unittest.TestCase):
    url = f"{URL}/fletch/{KEY}"

    def test_a_signature_is_genuine_and_its_parts_are_covered(self):
        self.assertEqual(answer(signed(self.url))[0], 200)
        request = signed(self.url)
        request.url += "?partNumber=1"
        self.assertEqual(answer(request), (403, "SignatureDoesNotMatch"))
        request = signed(self.url)
        request.url = f"{URL}/fletch?list-type=2"
        self.assertEqual(answer(request), (403, "SignatureDoesNotMatch"))
        request = signed(self.url)
        request.method = "HEAD"
        self.assertEqual(answer(request), (403, ""))
        request = signed(self.url)
        request.headers["Host"] = "other.example:1"
        self.assertEqual(answer(request), (403, "SignatureDoesNotMatch"), "replayed with another host")

    def test_wrong_secrets_and_ids(self):
        wrong = signed(self.url, secret=SECRET[:-1] + ("0" if SECRET[-1] != "0" else "1"))
        self.assertEqual(answer(wrong), (403, "SignatureDoesNotMatch"))
        other = ID.replace("FL1.", "FL1.0", 1)[:-12] + ID[-11:]
        self.assertEqual(answer(signed(self.url, identity=other))[0], 403)
        never = f"FL1.{'0' * 16}.{ID.rsplit('.', 1)[1]}"
        self.assertEqual(answer(signed(self.url, identity=never)), (403, "SignatureDoesNotMatch"))
        later = ID[:-1] + str((int(ID[-1]) + 1) % 10)
        longer = answer(signed(self.url, identity=later))
        self.assertEqual(longer, (403, "SignatureDoesNotMatch"), "a longer life")
        self.assertEqual(answer(signed(self.url, identity="AKIDEXAMPLE")), (403, "InvalidAccessKeyId"))

    def test_clocks(self):
        for later in (-890, 890):
            self.assertEqual(answer(signed(self.url, later=later))[0], 200)
        for later in (-930, 930):
            self.assertEqual(answer(signed(self.url, later=later)), (403, "RequestTimeTooSkewed"))

    def test_without_a_signature(self):
        self.assertEqual(answer(AWSRequest(method="GET", url=self.url)), (403, "AccessDenied"))
        request = AWSRequest(method="GET", url=self.url, headers={"Authorization": "Bearer x"})
        self.assertEqual(answer(request), (400, "InvalidRequest"))

    def presigned(self, version, seconds, key=KEY):
        client = boto3.client("s3", region_name="us-east-1", config=Config(signature_version=version))
        parameters = {"Bucket": "fletch", "Key": key, "ResponseContentType": "text/plain"}
        return client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=seconds)

    def test_presigned_urls(self):
        url = self.presigned("s3v4", 60)
        with urllib.request.urlopen(url) as reply:
            self.assertEqual(reply.headers["Content-Type"], "text/plain")
            self.assertEqual(reply.headers["Content-Security-Policy"], "sandbox")
        self.assertEqual(answer(AWSRequest(method="GET", url=url + "&x=1")), (403, "SignatureDoesNotMatch"))
        day = re.sub(r"X-Amz-Expires=60", "X-Amz-Expires=3600", url)
        self.assertEqual(answer(AWSRequest(method="GET", url=day)), (403, "SignatureDoesNotMatch"))
        token = AWSRequest(method="GET", url=url + "&X-Amz-Security-Token=t")
        self.assertEqual(answer(token), (400, "InvalidToken"))
        second = AWSRequest(method="GET", url=self.presigned("s3", 60))
        self.assertEqual(answer(second), (400, "InvalidRequest"), "signature version 2")
        original = auth.get_current_datetime
        auth.get_current_datetime = lambda *a, **kw: original(*a, **kw) - datetime.timedelta(seconds=120)
        try:
            old = self.presigned("s3v4", 60)
        finally:
            auth.get_current_datetime = original
        self.assertEqual(answer(AWSRequest(method="GET", url=old)), (403, "AccessDenied"), "expired")

    def test_a_foreign_dataset_is_absent(self):
        client = boto3.client("s3", region_name="us-east-1")
        for key in (FOREIGN, FOREIGN.replace("/", "@latest/", 1), "never/was", KEY + "x"):
            with self.assertRaises(ClientError) as refused:
                client.get_object(Bucket="fletch", Key=key)
            self.assertEqual(refused.exception.response["Error"]["Code"], "NoSuchKey", key)
        name = FOREIGN.split("/")[0]
        listed = client.list_objects_v2(Bucket="fletch", Prefix=name + "/")
        self.assertEqual((listed["KeyCount"], listed.get("Contents")), (0, None))
        top = client.list_objects_v2(Bucket="fletch", Delimiter="/")
        self.assertEqual([p["Prefix"] for p in top["CommonPrefixes"]], [KEY.split("/")[0] + "/"])
        with self.assertRaises(ClientError) as refused:
            client.list_objects_v2(Bucket="other")
        self.assertEqual(refused.exception.response["Error"]["Code"], "NoSuchBucket")

    def test_nothing_is_written(self):
        client = boto3.client("s3", region_name="us-east-1")
        calls = [
            lambda: client.put_object(Bucket="fletch", Key=KEY, Body=b"x"),
            lambda: client.delete_object(Bucket="fletch", Key=KEY),
            lambda: client.create_multipart_upload(Bucket="fletch", Key=KEY),
            lambda: client.create_bucket(Bucket="another"),
        ]
        for call in calls:
            with self.assertRaises(ClientError) as refused:
                call()
            self.assertEqual(refused.exception.response["ResponseMetadata"]["HTTPStatusCode"], 405)
        for call in (client.get_bucket_acl, client.get_bucket_versioning, client.list_object_versions):
            with self.assertRaises(ClientError) as refused:
                call(Bucket="fletch")
            self.assertEqual(refused.exception.response["Error"]["Code"], "NotImplemented")


if __name__ == "__main__":
    unittest.main()

//! The signatures of the first three tests were computed by botocore 1.44.8 (`S3SigV4Auth`).

use super::*;
use axum::http::{HeaderName, HeaderValue};

const SECRET: &str = "a secret of a test";
/// 2026-11-30T05:04:09Z.
const NOW_S: u64 = 1_796_015_049;
const NO_BODY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
const CREDENTIAL: &str = "FL1.00000000000000ab.1800000000/20261130/eu-central-1/s3/aws4_request";

/// A request with the headers that botocore's have.
struct Request {
    method: Method,
    path: &'static str,
    query: Query,
    headers: HeaderMap,
}

impl Request {
    fn new(path: &'static str, query: &str, authorization: Option<&str>) -> Self {
        let mut request = Request {
            method: Method::GET,
            path,
            query: Query::read(query).expect("a query"),
            headers: HeaderMap::new(),
        };
        request.set("host", "127.0.0.1:7381");
        if let Some(authorization) = authorization {
            request.set("x-amz-date", "20261130T050409Z");
            request.set("x-amz-content-sha256", NO_BODY);
            request.set("authorization", authorization);
        }
        request
    }

    fn set(&mut self, name: &str, value: &str) {
        let name = HeaderName::try_from(name).expect("a name");
        self.headers.insert(name, HeaderValue::try_from(value).expect("a value"));
    }

    fn signed(&self) -> SignedRequest<'_> {
        let Request { method, path, query, headers } = self;
        SignedRequest { method, path, query, headers }
    }

    fn claim(&self) -> S3Result<Option<Claim>> {
        Claim::read(&self.signed())
    }

    fn is_genuine(&self) -> bool {
        let claim = self.claim().expect("a signature").expect("one");
        claim.is_of(&self.signed(), &S3Secret::of_text(SECRET))
    }

    fn refusal(&self) -> Option<S3Code> {
        self.claim().err().map(|e| e.code)
    }
}

fn list() -> Request {
    let authorization = format!(
        "AWS4-HMAC-SHA256 Credential={CREDENTIAL}, SignedHeaders=host;x-amz-content-sha256;x-amz-date, \
         Signature=3bac410a41d5e5a427e9721fc42c2c69dc404c36398cd060a060ea5a9c746762"
    );
    let query = "list-type=2&prefix=photos%2Fa%20b%2B&delimiter=%2F&encoding-type=url";
    Request::new("/fletch", query, Some(&authorization))
}

fn presigned(more: &str) -> Request {
    let query = "response-content-type=text%2Fplain&X-Amz-Algorithm=AWS4-HMAC-SHA256&\
        X-Amz-Credential=FL1.00000000000000ab.1800000000%2F20261130%2Fus-east-1%2Fs3%2Faws4_request&\
        X-Amz-Date=20261130T050409Z&X-Amz-Expires=600&X-Amz-SignedHeaders=host&\
        X-Amz-Signature=7c6cea618720b7ddfdbf575b6d2c9ecadbb31c744a4502d0df4f1521f7eeeebb";
    Request::new("/fletch/photos/a b.jpg", &format!("{query}{more}"), None)
}

#[test]
fn a_signed_list_is_genuine_until_anything_of_it_changes() {
    assert!(list().is_genuine());
    assert_eq!(list().claim().expect("read").expect("one").id, "FL1.00000000000000ab.1800000000");
    let mut other = list();
    other.set("host", "127.0.0.1:7382");
    assert!(!other.is_genuine(), "another host");
    let mut other = list();
    other.path = "/fletch/";
    assert!(!other.is_genuine(), "another path");
    let mut other = list();
    other.method = Method::HEAD;
    assert!(!other.is_genuine(), "another method");
    let mut other = list();
    other.query = Query::read("list-type=2&prefix=&delimiter=%2F&encoding-type=url").expect("a query");
    assert!(!other.is_genuine(), "another query");
    let mut other = list();
    other.set("x-amz-date", "20261130T050410Z");
    assert!(!other.is_genuine(), "another time");
    let claim = list().claim().expect("read").expect("one");
    assert!(!claim.is_of(&list().signed(), &S3Secret::of_text("another secret")));
}

#[test]
fn odd_keys_and_signed_headers_with_spaces() {
    let authorization = format!(
        "AWS4-HMAC-SHA256 Credential={CREDENTIAL}, SignedHeaders=host;range;x-amz-checksum-mode;\
         x-amz-content-sha256;x-amz-date;x-amz-two, \
         Signature=1728ffd2c7516e66c13a7d53942fd14a786810f959ec6b259bfa40e4b3ab6b91"
    );
    let mut request = Request::new("/fletch/photos@v1/a b/é+&.jpg", "", Some(&authorization));
    request.set("range", "bytes=0-9");
    request.set("x-amz-checksum-mode", "ENABLED");
    assert!(!request.is_genuine(), "a signed header is missing");
    request.set("x-amz-two", "  a   b ");
    assert!(request.is_genuine());
    request.set("range", "bytes=0-8");
    assert!(!request.is_genuine(), "another range");
}

#[test]
fn a_presigned_url_is_genuine_while_it_lives() {
    let request = presigned("");
    assert!(request.is_genuine());
    assert!(!presigned("&response-content-type=text%2Fhtml").is_genuine(), "another parameter");
    let claim = request.claim().expect("read").expect("one");
    let at = |now_s: u64| claim.check_time(now_s).map_err(|e| e.code);
    assert_eq!((at(NOW_S), at(NOW_S + 600), at(NOW_S - 900)), (Ok(()), Ok(()), Ok(())));
    assert_eq!((at(NOW_S + 601), at(NOW_S - 901)), (Err(S3Code::AccessDenied), Err(S3Code::AccessDenied)));
}

#[test]
fn a_header_is_good_for_fifteen_minutes() {
    let claim = list().claim().expect("read").expect("one");
    let at = |now_s: u64| claim.check_time(now_s).map_err(|e| e.code);
    assert_eq!((at(NOW_S - 900), at(NOW_S + 900)), (Ok(()), Ok(())));
    for now_s in [NOW_S - 901, NOW_S + 901, 0, u64::MAX] {
        assert_eq!(at(now_s), Err(S3Code::RequestTimeTooSkewed), "{now_s}");
    }
}

#[test]
fn what_is_no_signature_of_this_kind_is_refused_by_its_name() {
    assert_eq!(Request::new("/", "", None).claim(), Ok(None));
    let header = |authorization: &str| Request::new("/", "", Some(authorization)).refusal();
    assert_eq!(header("AWS id:c2ln"), Some(S3Code::InvalidRequest), "version 2");
    assert_eq!(header("Bearer x"), Some(S3Code::InvalidRequest));
    let v2 = Request::new("/", "AWSAccessKeyId=x&Signature=y&Expires=1", None);
    assert_eq!(v2.refusal(), Some(S3Code::InvalidRequest));
    assert!(v2.claim().expect_err("refused").message.contains("signature_version=\"s3v4\""));
    let mut session = list();
    session.set("x-amz-security-token", "t");
    assert_eq!(session.refusal(), Some(S3Code::InvalidToken));
    assert_eq!(presigned("&X-Amz-Security-Token=t").refusal(), Some(S3Code::InvalidToken));
    let of = |credential: &str, headers: &str, signature: &str| {
        header(&format!(
            "AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={headers}, Signature={signature}"
        ))
    };
    let (good, digits) = ("host;x-amz-date", "0".repeat(64));
    assert_eq!(of(CREDENTIAL, good, &digits), None);
    let malformed = Some(S3Code::AuthorizationHeaderMalformed);
    for credential in
        ["id", "id/20261130/r/s3", "/20261130/r/s3/aws4_request", "id/20261130/r/ec2/aws4_request"]
    {
        assert_eq!(of(credential, good, &digits), malformed, "{credential}");
    }
    assert_eq!(of("id/20261129/r/s3/aws4_request", good, &digits), malformed, "another day");
    assert_eq!(of(CREDENTIAL, "x-amz-date", &digits), malformed, "without the host");
    for signature in ["", "00", "zz", &"0".repeat(66)] {
        assert_eq!(of(CREDENTIAL, good, signature), malformed, "{signature}");
    }
    let mut undated = list();
    for date in ["", "2026", "20261130T050409", "20261330T050409Z", "2026113éT050409Z"] {
        undated.headers.insert("x-amz-date", HeaderValue::from_bytes(date.as_bytes()).expect("a value"));
        assert!(undated.refusal().is_some(), "{date}");
    }
    for expires in ["0", "604801", "x", "-1"] {
        let query = format!(
            "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={CREDENTIAL}&X-Amz-Date=20261130T050409Z&\
             X-Amz-Expires={expires}&X-Amz-SignedHeaders=host&X-Amz-Signature={digits}"
        );
        let refusal = Request::new("/", &query, None).refusal();
        assert_eq!(refusal, Some(S3Code::AuthorizationQueryParametersError), "{expires}");
    }
}

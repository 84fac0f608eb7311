//! Requests of S3 clients: queries, signatures, parameters of listings and continuation tokens.

use crate::plant;
use fletch_server::fuzzing;
use http::{HeaderMap, HeaderName, HeaderValue};
use std::sync::LazyLock;

/// The secret of the seeds' signatures.
const SECRET: &str = "a secret of a test";

/// A signed request, and a presigned one, by botocore; a listing, and a token of one.
const SEEDS: [&str; 4] = [
    "GET /fletch?list-type=2&prefix=photos%2Fa%20b%2B&delimiter=%2F&encoding-type=url\n\
     host: 127.0.0.1:7381\nx-amz-date: 20261130T050409Z\n\
     x-amz-content-sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n\
     authorization: AWS4-HMAC-SHA256 \
     Credential=FL1.00000000000000ab.1800000000/20261130/eu-central-1/s3/aws4_request, \
     SignedHeaders=host;x-amz-content-sha256;x-amz-date, \
     Signature=3bac410a41d5e5a427e9721fc42c2c69dc404c36398cd060a060ea5a9c746762",
    "GET /fletch/photos/a%20b.jpg?response-content-type=text%2Fplain&X-Amz-Algorithm=AWS4-HMAC-SHA256&\
     X-Amz-Credential=FL1.00000000000000ab.1800000000%2F20261130%2Fus-east-1%2Fs3%2Faws4_request&\
     X-Amz-Date=20261130T050409Z&X-Amz-Expires=600&X-Amz-SignedHeaders=host&\
     X-Amz-Signature=7c6cea618720b7ddfdbf575b6d2c9ecadbb31c744a4502d0df4f1521f7eeeebb\n\
     host: 127.0.0.1:7381",
    "HEAD /fletch/d@v1/a+b//c?partNumber=1&acl&=&a=%C3%A9&a\nhost: h\nauthorization: AWS id:x",
    "GET /fletch?list-type=2&continuation-token=\
     AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAGQvYQA&max-keys=7&start-after=d/a&marker=x\nhost: h",
];

pub fn seeds() -> Vec<Vec<u8>> {
    SEEDS.map(|seed| seed.as_bytes().to_vec()).to_vec()
}

/// What the signatures of the seeds cover.
static COVERED: LazyLock<Vec<String>> = LazyLock::new(|| SEEDS.into_iter().filter_map(genuine).collect());

/// The first line is a method and a target, the other lines are headers.
fn genuine(text: &str) -> Option<String> {
    let (line, headers) = text.split_once('\n').unwrap_or((text, ""));
    let (method, target) = line.split_once(' ')?;
    let mut map = HeaderMap::new();
    for header in headers.lines() {
        let (name, value) = header.split_once(':')?;
        map.append(HeaderName::try_from(name).ok()?, HeaderValue::try_from(value.trim()).ok()?);
    }
    fuzzing::s3_signed(method, target, &map, SECRET)
}

/// A query has one signed form. A token reads back. Only what was signed is genuine.
pub fn run(input: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(input) else { return false };
    let target = text.split(['\n', ' ']).nth(1).unwrap_or("");
    let query = target.split_once('?').map_or("", |(_, query)| query);
    let Some(form) = fuzzing::s3_query(query) else { return false };
    assert_eq!(fuzzing::s3_query(&form).as_deref(), Some(form.as_str()), "two signed forms of a query");
    for token in query.split(['&', '=']) {
        if let Some(again) = fuzzing::s3_token(token) {
            assert_eq!(again, token, "two forms of a token");
        }
    }
    let lists = fuzzing::s3_listing(query);
    if let Some(covered) = genuine(text) {
        assert!(COVERED.contains(&covered), "a forged signature: {covered}");
        plant::bug(text != SEEDS[0] && text != SEEDS[1]);
    }
    lists
}

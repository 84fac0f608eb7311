//! Short texts: ranges and preconditions of requests; names, URIs, sizes and times.

use crate::plant;
use fletch_client::Endpoint;
use fletch_core::{DatasetName, Domain, Hash, JobName, TagName, Tenant};
use fletch_origin::OriginUri;
use fletch_server::fuzzing;
use fletch_settings::{Amount, ByteSize, Span};
use http::{HeaderMap, HeaderValue, header};
use std::{fmt::Display, str::FromStr};

/// The etag of the representation whose ranges the inputs ask for.
const ETAG: &str = "\"e\"";

pub fn range_seeds() -> Vec<Vec<u8>> {
    let lines = [
        "\x0abytes=0-0",
        "\x0abytes=2-",
        "\x0abytes=-3\n\"e\"",
        "\x0abytes=0-1,3-4\n\"other\"\n\"a\", W/\"e\"",
        "\x0abytes=5-99999999999999999999999\n\n*",
        "\x0abytes=1-\n\n\n\"e\", \"f\"",
    ];
    lines.map(|l| l.as_bytes().to_vec()).to_vec()
}

/// The first byte is the length of the representation; lines are `Range`, `If-Range`, `If-None-Match` and
/// `If-Match`.
///
/// A range lies within the representation and is not empty. Only `If-Match` leads to a 412.
pub fn run_range(input: &[u8]) -> bool {
    let Some((&len, lines)) = input.split_first() else { return false };
    let mut headers = HeaderMap::new();
    let names = [header::RANGE, header::IF_RANGE, header::IF_NONE_MATCH, header::IF_MATCH];
    for (name, line) in names.into_iter().zip(lines.split(|b| *b == b'\n')) {
        if let Ok(value) = HeaderValue::from_bytes(line) {
            headers.insert(name, value);
        }
    }
    let status = fuzzing::precondition(&headers, ETAG);
    match status {
        None => {}
        Some(304) => assert!(headers.contains_key(header::IF_NONE_MATCH), "a 304 without its header"),
        Some(412) => assert!(headers.contains_key(header::IF_MATCH), "a 412 without its header"),
        Some(other) => panic!("the status {other}"),
    }
    let unchanged = status == Some(304);
    match fuzzing::requested_range(&headers, len.into(), ETAG) {
        Ok(None) => unchanged,
        Ok(Some(part)) => {
            assert!(part.start < part.end && part.end <= u64::from(len), "{part:?} of {len}");
            plant::bug(part.end - part.start == 4);
            true
        }
        Err(status) => {
            assert_eq!(status, 416);
            false
        }
    }
}

pub fn name_seeds() -> Vec<Vec<u8>> {
    let texts = [
        "images/train-7",
        "latest",
        "vision",
        "s3://bucket/a/b%20c",
        "az://account/container/x",
        "file:///data",
        "gs://bucket",
        "https://host:8080/base/",
        "https://host/a%0Db/.%09./c",
        "/data/üx",
        "unix:/run/x.sock",
        "64MiB",
        "1.5GiB",
        "0",
        "30s",
        "2h 5min",
        "10%",
        "92a2b787a06d7272df43eaf87acc3b9c1d315d79d599d61c285983483e431998",
    ];
    texts.map(|t| t.as_bytes().to_vec()).to_vec()
}

/// A value is written as a text that gives the same value.
pub fn run_name(input: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(input) else { return false };
    let parsed = [
        round::<DatasetName>(text),
        round::<TagName>(text),
        round::<JobName>(text),
        round::<Domain>(text),
        round::<Tenant>(text),
        round::<Hash>(text),
        round::<ByteSize>(text),
        round::<Amount>(text),
        round::<Span>(text),
        shown::<Endpoint>(text).is_some(),
    ];
    let uri = OriginUri::parse(text).is_ok_and(|uri| {
        let shown = uri.to_string();
        let again = OriginUri::parse(&shown).unwrap_or_else(|e| panic!("{text:?} is {shown:?}: {e}"));
        assert_eq!(again, uri, "{text:?} is {shown:?}");
        plant::bug(text.starts_with("az") && shown.contains("%7F"));
        true
    });
    uri || parsed.contains(&true)
}

/// Returns a value as it is written, if the text is a value. What is written is read and written as itself.
fn shown<T: FromStr<Err: Display> + Display>(text: &str) -> Option<(T, String)> {
    let value = text.parse::<T>().ok()?;
    let shown = value.to_string();
    let again = shown.parse::<T>().unwrap_or_else(|e| panic!("{text:?} is shown as {shown:?}: {e}"));
    assert_eq!(again.to_string(), shown, "{text:?} is shown in two ways");
    Some((again, shown))
}

/// Returns whether the text is a value. What is written is read as the same value.
fn round<T: FromStr<Err: Display> + Display + PartialEq>(text: &str) -> bool {
    let Some((again, shown)) = shown::<T>(text) else { return false };
    assert!(text.parse::<T>().is_ok_and(|v| v == again), "{text:?} is shown as {shown:?}, another value");
    true
}

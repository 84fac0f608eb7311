//! Entity tags that have one form in a listing and another one in an answer.
//!
//! The server compares `If-Match` with its own tag byte by byte, as strict stores do.

use crate::{limits, uri};
use fletch_origin::{Credentials, Origin, OriginConfig, OriginError, Origins, Pin};
use fletch_testkit::scripted::{ScriptedServer, answer, header};

const BODY: &[u8] = b"0123456789abcdefghij";
const MD5: &str = "9e107d9d372bb6826bd81d3542a419d6";
/// 2023-11-14T22:13:20Z, and the same in a header.
const TIME_NS: i64 = 1_700_000_000_000_000_000;
const TIME: &str = "Tue, 14 Nov 2023 22:13:20 GMT";

/// Returns a server whose object has this tag, or none.
fn server(etag: Option<String>) -> ScriptedServer {
    ScriptedServer::start(move |head| {
        let condition = header(head, "if-match");
        if condition.is_some_and(|tag| Some(tag) != etag.as_deref() || tag.starts_with("W/")) {
            return answer("412 Precondition Failed", &[], b"");
        }
        let mut headers = vec![("Last-Modified", TIME)];
        headers.extend(etag.as_deref().map(|etag| ("ETag", etag)));
        let range = header(head, "range").and_then(|r| r.strip_prefix("bytes=")?.split_once('-'));
        let Some((first, last)) = range else { return answer("200 OK", &headers, BODY) };
        let (first, last): (usize, usize) = (first.parse().expect("first"), last.parse().expect("last"));
        let range = format!("bytes {first}-{last}/{}", BODY.len());
        headers.push(("Content-Range", &range));
        answer("206 Partial Content", &headers, &BODY[first..=last])
    })
}

fn open(server: &ScriptedServer, is_plain: bool) -> Origin {
    let config = OriginConfig {
        prefix: if is_plain { server.endpoint() } else { "s3://bucket".to_owned() },
        endpoint: (!is_plain).then(|| server.endpoint()),
        credentials: (!is_plain).then_some(Credentials::Anonymous),
        region: (!is_plain).then(|| "x".to_owned()),
        allow_http: true,
        ..OriginConfig::default()
    };
    let at = uri(&config.prefix);
    Origins::new(vec![config], limits(2_000)).expect("a right configuration").open(&at).expect("open")
}

fn pin(etag: Option<String>, mtime_ns: Option<i64>) -> Pin {
    Pin { size: BODY.len() as u64, mtime_ns, etag }
}

#[tokio::test]
async fn an_object_is_read_whatever_the_forms_of_its_tag() {
    let quoted = || Some(format!("\"{MD5}\""));
    let (bare, upper) = (Some(MD5.to_owned()), Some(format!("\"{}\"", MD5.to_uppercase())));
    let (weak, parts) = (Some(format!("W/\"{MD5}\"")), Some(format!("\"{MD5}-3\"")));
    let (empty, no_text) = (Some("\"\"".to_owned()), Some(String::new()));
    let blanks = Some(format!(" {MD5} "));
    // The listing, the answer, and the requests of one read.
    let cases = [
        (quoted(), quoted(), 1),
        (bare.clone(), quoted(), 1),
        (blanks, quoted(), 1),
        (quoted(), bare, 2),
        (upper.clone(), quoted(), 2),
        (quoted(), upper, 2),
        (weak.clone(), quoted(), 1),
        (quoted(), weak.clone(), 2),
        (weak.clone(), weak, 1),
        (parts.clone(), quoted(), 2),
        (quoted(), parts, 2),
        (None, quoted(), 1),
        (quoted(), None, 2),
        (empty.clone(), quoted(), 1),
        (quoted(), empty, 2),
        (no_text, quoted(), 1),
    ];
    for (listed, sent, requests) in cases {
        for is_plain in [false, true] {
            let server = server(sent.clone());
            let origin = open(&server, is_plain);
            let pin = pin(listed.clone(), Some(TIME_NS + 123_000_000));
            let got = origin.get("x", Some(3..10), Some(&pin)).await;
            let got = got.unwrap_or_else(|e| panic!("{listed:?} {sent:?}: {e}"));
            assert_eq!(got.bytes.as_ref(), &BODY[3..10]);
            assert_eq!(server.heads().len(), requests, "{listed:?} {sent:?}");
            // Later ranges that are pinned to the first answer need one request each.
            let later = pin.of_later_ranges(&got.meta);
            origin.get("x", Some(10..20), Some(&later)).await.expect("a later range");
            let expected = if got.meta.etag.as_deref() == Some(MD5) || sent.is_none() { 2 } else { 1 };
            let is_tagged = got.meta.etag.as_deref().is_some_and(|tag| tag != "\"\"");
            if is_tagged {
                assert_eq!(server.heads().len(), requests + expected, "{listed:?} {sent:?}");
            }
        }
    }
}

#[tokio::test]
async fn another_tag_is_a_change_unless_the_hash_decides() {
    let other = || Some(format!("\"{}\"", MD5.replace('9', "8")));
    let later = Some(TIME_NS + 1_000_000_000);
    let cases = [
        (other(), Some(format!("\"{MD5}\""))),
        (Some(format!("\"{MD5}-gzip\"")), Some(format!("\"{MD5}\""))),
        (other(), Some(format!("W/\"{MD5}\""))),
        // The tags decide nothing, and the times differ.
        (None, Some(format!("\"{MD5}\""))),
        (Some(format!("\"{MD5}\"")), None),
        (Some(format!("\"{MD5}-3\"")), Some(format!("\"{MD5}\""))),
    ];
    for (listed, sent) in cases {
        for is_plain in [false, true] {
            let server = server(sent.clone());
            let origin = open(&server, is_plain);
            let pin = pin(listed.clone(), later);
            let error = origin.get("x", Some(0..5), Some(&pin)).await.expect_err("another object");
            assert!(matches!(error, OriginError::Changed { .. }), "{listed:?} {sent:?}: {error:?}");
            let got = origin.get_hashed("x", Some(0..5), &pin).await.expect("the caller hashes");
            assert_eq!((got.bytes.as_ref(), got.meta.etag.clone()), (&BODY[..5], sent.clone()));
            let longer = Pin { size: 21, ..pin };
            let error = origin.get_hashed("x", Some(0..5), &longer).await.expect_err("another size");
            assert!(matches!(error, OriginError::Changed { .. }), "{listed:?} {sent:?}: {error:?}");
        }
    }
}

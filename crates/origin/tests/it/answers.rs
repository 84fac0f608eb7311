//! Answers that do not fit their request: redirects, 204, foreign encodings, wrong lengths and ranges.
//!
//! Each is an error of the origin, in words that name status, encoding and length. No text of such an answer
//! appears in an error or a log line.

use crate::{limits, uri};
use fletch_core::Kind;
use fletch_origin::{Credentials, Origin, OriginConfig, OriginError, Origins, Pin};
use fletch_testkit::scripted::{ScriptedServer, answer, header};
use futures::TryStreamExt as _;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

const BODY: &[u8] = b"0123456789abcdefghij";
const SECRET: &str = "hunter2SECRET";

fn store(server: &ScriptedServer) -> OriginConfig {
    OriginConfig {
        prefix: "s3://bucket".to_owned(),
        endpoint: Some(server.endpoint()),
        credentials: Some(Credentials::Anonymous),
        allow_http: true,
        ..OriginConfig::default()
    }
}

fn plain(server: &ScriptedServer) -> OriginConfig {
    OriginConfig { prefix: server.endpoint(), allow_http: true, ..OriginConfig::default() }
}

fn open(config: OriginConfig) -> Origin {
    let at = uri(&config.prefix);
    Origins::new(vec![config], limits(2_000)).expect("a right configuration").open(&at).expect("open")
}

fn pin() -> Pin {
    Pin { size: BODY.len() as u64, mtime_ns: None, etag: Some("\"e\"".to_owned()) }
}

/// Asserts that the error is the origin's: no kind that blames the object or Fletch, and not asked again.
fn assert_origins_fault(error: &OriginError, words: &[&str], server: &ScriptedServer, requests: usize) {
    assert!(matches!(error, OriginError::WrongAnswer { .. }), "{error:?}");
    assert_eq!(error.kind(), Kind::Unavailable);
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} should name {word:?}");
    }
    assert!(!text.contains("changed") && !text.contains(SECRET), "{text}");
    assert_eq!(server.heads().len(), requests, "{text}: {:#?}", server.heads());
}

/// One answer, whether the range `0..10` is requested (else the whole object), and the words of the error.
type Case = (&'static str, Vec<(&'static str, &'static str)>, &'static [u8], bool, Vec<&'static str>);

#[tokio::test]
async fn wrong_answers_are_the_origins_fault_and_say_what_came() {
    let etag = ("ETag", "\"e\"");
    let cases: Vec<Case> = vec![
        (
            "301 Moved",
            vec![("Location", "/elsewhere")],
            b"hunter2SECRET",
            true,
            vec!["status 301", "redirects"],
        ),
        (
            "302 Found",
            vec![("Location", "http://127.0.0.1:1/x")],
            b"hunter2SECRET",
            false,
            vec!["status 302"],
        ),
        (
            "307 Temporary",
            vec![("Location", "//x/")],
            b"hunter2SECRET",
            true,
            vec!["status 307", "redirects"],
        ),
        ("308 Permanent", vec![], b"hunter2SECRET", true, vec!["status 308", "redirects"]),
        ("300 Choices", vec![], b"hunter2SECRET", false, vec!["status 300"]),
        ("304 Not Modified", vec![("Content-Length", "")], b"", true, vec!["status 304"]),
        ("204 No Content", vec![("Content-Length", "")], b"", true, vec!["status 204", "status 206"]),
        ("204 No Content", vec![("Content-Length", "")], b"", false, vec!["status 204", "status 200"]),
        ("202 Accepted", vec![etag], b"hunter2SECRET", false, vec!["status 202", "Content-Length 13"]),
        (
            "200 OK",
            vec![etag, ("Content-Encoding", "gzip")],
            b"hunter2SECRET",
            false,
            vec!["status 200", "Content-Encoding gzip", "Content-Length 13", "expected the stored bytes"],
        ),
        (
            "206 Partial Content",
            vec![etag, ("Content-Encoding", "gzip"), ("Content-Range", "bytes 0-9/20")],
            b"hunter2SECRET",
            true,
            vec!["status 206", "Content-Encoding gzip", "Content-Length 13", "stored bytes"],
        ),
        (
            "206 Partial Content",
            vec![etag, ("Content-Range", "bytes 5-14/20")],
            b"hunter2SEC",
            true,
            vec!["status 206", "Content-Range 5-14", "expected bytes 0-9"],
        ),
        (
            "206 Partial Content",
            vec![etag, ("Content-Range", "bytes 0-9/20")],
            b"hunter2SECRET",
            true,
            vec!["status 206", "Content-Length 13", "expected bytes 0-9"],
        ),
        ("206 Partial Content", vec![etag], b"hunter2SEC", true, vec!["status 206", "expected bytes 0-9"]),
        ("206 Partial Content", vec![etag], b"hunter2SEC", false, vec!["status 206", "status 200"]),
        // The etag is that of the pin, so the object is the same and the length is wrong.
        (
            "200 OK",
            vec![etag],
            b"hunter2SECRET",
            false,
            vec!["status 200", "Content-Length 13", "20 bytes", "etag"],
        ),
    ];
    for (status, headers, body, is_ranged, words) in cases {
        for config in [store as fn(&ScriptedServer) -> OriginConfig, plain] {
            let bytes = answer(status, &headers, body);
            let server = ScriptedServer::start(move |_| bytes.clone());
            let origin = open(config(&server));
            let range = is_ranged.then_some(0..10);
            let error = origin.get("d/x", range, Some(&pin())).await.expect_err(status);
            assert_origins_fault(&error, &words, &server, 1);
        }
    }
}

#[tokio::test]
async fn a_whole_object_for_a_range_of_a_store_is_the_origins_fault() {
    let server = ScriptedServer::start(|_| answer("200 OK", &[("ETag", "\"e\"")], BODY));
    let error = open(store(&server)).get("x", Some(0..10), Some(&pin())).await.expect_err("no range");
    assert_origins_fault(&error, &["status 200", "Content-Length 20", "status 206"], &server, 1);
    // A plain server may do so. The object is read whole, and its part is returned.
    let server = ScriptedServer::start(|_| answer("200 OK", &[("ETag", "\"e\"")], BODY));
    let got = open(plain(&server)).get("x", Some(3..10), Some(&pin())).await.expect("the part");
    assert_eq!(got.bytes, "3456789");
}

#[tokio::test]
async fn a_length_that_the_body_does_not_have_is_named() {
    let headers = [("ETag", "\"e\""), ("Content-Length", "20")];
    let bytes = answer("200 OK", &headers, &BODY[..7]);
    let server = ScriptedServer::start(move |_| bytes.clone());
    let error = open(store(&server)).get("x", None, Some(&pin())).await.expect_err("short");
    let text = error.to_string();
    assert!(matches!(error, OriginError::Unavailable { .. }), "{error:?}");
    assert!(text.contains("Content-Length 20") && text.contains("7 of 20 bytes"), "{text}");
}

#[tokio::test]
async fn a_coding_that_the_writer_of_an_object_gave_is_no_fault() {
    let headers = [("ETag", "\"e\""), ("Content-Encoding", "gzip")];
    let bytes = answer("200 OK", &headers, BODY);
    let server = ScriptedServer::start(move |_| bytes.clone());
    let got = open(store(&server)).get("x", None, Some(&pin())).await.expect("the stored bytes");
    assert_eq!(got.bytes, BODY);
    // A plain server is asked for no coding.
    let server = ScriptedServer::start(|_| answer("404 Not Found", &[], b""));
    open(plain(&server)).get("x", None, None).await.expect_err("none");
    assert_eq!(header(&server.heads()[0], "accept-encoding"), Some("identity"));
}

#[tokio::test]
async fn ranges_of_an_object_of_unknown_size_are_read() {
    for config in [store as fn(&ScriptedServer) -> OriginConfig, plain] {
        let server = ScriptedServer::start(|head| {
            let range = header(head, "range").and_then(|r| r.strip_prefix("bytes=")?.split_once('-'));
            let Some((first, last)) = range else { return answer("200 OK", &[("ETag", "\"e\"")], BODY) };
            let (first, last): (usize, usize) = (first.parse().expect("first"), last.parse().expect("last"));
            let range = format!("bytes {first}-{last}/*");
            answer("206 Partial", &[("ETag", "\"e\""), ("Content-Range", &range)], &BODY[first..=last])
        });
        let origin = open(config(&server));
        let got = origin.get("x", Some(3..10), Some(&pin())).await.expect("a pinned range");
        assert_eq!((got.bytes.as_ref(), got.meta.size), (&BODY[3..10], 20));
        let got = origin.get("x", Some(10..20), None).await.expect("a range without a pin");
        assert_eq!((got.bytes.as_ref(), got.meta.size), (&BODY[10..], 20));
        let other = Pin { etag: Some("\"other\"".to_owned()), ..pin() };
        let error = origin.get("x", Some(3..10), Some(&other)).await.expect_err("another object");
        assert!(matches!(error, OriginError::Changed { .. }), "{error:?}");
    }
}

/// The 302 of a fake store leads to a second server, which plays a metadata service.
#[tokio::test]
async fn no_call_follows_a_redirect() {
    let metadata = ScriptedServer::start(|_| answer("200 OK", &[("ETag", "\"e\"")], SECRET.as_bytes()));
    let target = format!("{}/latest/meta-data/iam", metadata.endpoint());
    for status in ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"] {
        let location = target.clone();
        let server = ScriptedServer::start(move |_| answer(status, &[("Location", &location)], b""));
        for (is_plain, origin) in every_kind(&server) {
            let mut errors = vec![
                origin.get("x", None, None).await.expect_err("get"),
                origin.get("x", Some(0..5), Some(&pin())).await.expect_err("get a range"),
                origin.head("x").await.expect_err("head"),
            ];
            if !is_plain {
                let mut listing = origin.list("");
                let listed = futures::StreamExt::next(&mut listing).await.expect("an item");
                errors.push(listed.expect_err("list"));
                let put = origin.put("x", "1".into(), fletch_origin::PutMode::Overwrite).await;
                errors.push(put.expect_err("put"));
                errors.push(origin.delete("x").await.expect_err("delete"));
            }
            for error in errors {
                let text = format!("{error} {error:?}");
                assert!(matches!(error, OriginError::WrongAnswer { .. }), "{text}");
                assert!(text.contains(&status[..3]) && !text.contains(SECRET), "{text}");
                assert!(!text.contains(&target), "{text}");
            }
        }
    }
    assert_eq!(metadata.heads(), Vec::<String>::new(), "no request reached the second server");
}

/// Collects what a subscriber of `tracing` writes.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Opens an origin of each kind at one server. No call is tried twice.
fn every_kind(server: &ScriptedServer) -> Vec<(bool, Origin)> {
    let configs = vec![
        store(server),
        OriginConfig { prefix: "gs://bucket".to_owned(), ..store(server) },
        OriginConfig {
            prefix: "az://bucket".to_owned(),
            account: Some("account".to_owned()),
            ..store(server)
        },
        plain(server),
    ];
    let limits = fletch_origin::OriginLimits { attempts_max: 1, ..limits(2_000) };
    let origins = Origins::new(configs.clone(), limits).expect("right");
    configs.iter().map(|c| (c.endpoint.is_none(), origins.open(&uri(&c.prefix)).expect("open"))).collect()
}

/// Makes every kind of call, and adds the errors to `outputs`.
async fn call_all(origin: &Origin, is_plain: bool, outputs: &mut Vec<String>) {
    let mut note = |error: OriginError| outputs.push(format!("{error} {error:?}"));
    // An answer that fits is no error, and its bytes are the caller's.
    origin.get("x", Some(0..10), Some(&pin())).await.err().map(&mut note);
    origin.get("x", None, Some(&pin())).await.err().map(&mut note);
    origin.head("x").await.err().map(&mut note);
    if !is_plain {
        let mut listing = origin.list("");
        if let Some(Err(error)) = futures::StreamExt::next(&mut listing).await {
            note(error);
        }
        origin.put("x", "1".into(), fletch_origin::PutMode::Create).await.err().map(&mut note);
        origin.delete("x").await.err().map(&mut note);
    }
}

/// The secret lies in the body, in the error code, in the reason, and in headers that errors are about.
#[tokio::test]
async fn no_text_of_a_foreign_answer_is_quoted() {
    let log = Log::default();
    let sink = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_writer(move || sink.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let documents = [
        format!("<Error><Code>{SECRET}</Code><Message>{SECRET}</Message></Error>"),
        format!("<Error><Code>AccessDenied</Code><Message>{SECRET}</Message></Error>"),
        format!("{{\"AccessKeyId\": \"{SECRET}\", \"Token\": \"{SECRET}\"}}"),
        format!("<ListBucketResult><KeyCount>{SECRET}</KeyCount></ListBucketResult>"),
    ];
    let headers = [
        vec![],
        vec![("Last-Modified", SECRET), ("ETag", "\"e\"")],
        vec![("Content-Range", SECRET), ("Content-Encoding", SECRET), ("Location", SECRET)],
        vec![("Retry-After", SECRET), ("Content-Type", SECRET), ("x-amz-version-id", SECRET)],
    ];
    let said = Arc::new(Mutex::new(Vec::new()));
    let saying = Arc::clone(&said);
    let server = ScriptedServer::start(move |_| saying.lock().clone());
    let mut outputs = Vec::new();
    for status in [200, 206, 301, 302, 400, 401, 403, 404, 405, 409, 412, 416, 500, 501, 503, 599] {
        // New clients for each status: after a 503 a client slows down.
        let origins = every_kind(&server);
        for (document, headers) in documents.iter().zip(headers.iter().cycle().skip(status % 4)) {
            *said.lock() = answer(&format!("{status} {SECRET}"), headers, document.as_bytes());
            for (is_plain, origin) in &origins {
                call_all(origin, *is_plain, &mut outputs).await;
            }
        }
    }
    assert!(outputs.len() > 1_000, "{} errors were searched", outputs.len());
    let quoted = outputs.iter().find(|line| line.contains(SECRET));
    assert_eq!(quoted, None, "an error quotes the answer");
    let log = String::from_utf8(log.0.lock().clone()).expect("text");
    let quoted = log.lines().find(|line| line.contains(SECRET));
    assert_eq!(quoted, None, "a log line quotes the answer");
}

#[tokio::test]
async fn missing_buckets_other_regions_and_bad_keys_are_named_in_words() {
    let document = |code: &str| format!("<Error><Code>{code}</Code><Message>{SECRET}</Message></Error>");
    let elsewhere = ("x-amz-bucket-region", "eu-west-1");
    let cases = [
        ("404 Not Found", "NoSuchBucket", vec![], vec!["no such bucket", "NoSuchBucket", "check the name"]),
        ("301 Moved", "PermanentRedirect", vec![elsewhere], vec!["region eu-west-1", "AWS_REGION"]),
        ("400 Bad", "AuthorizationHeaderMalformed", vec![elsewhere], vec!["region eu-west-1", "AWS_REGION"]),
        ("400 Bad", "AuthorizationHeaderMalformed", vec![], vec!["another region", "AWS_REGION"]),
        ("403 Forbidden", "AccessDenied", vec![], vec!["AccessDenied", "permission"]),
        ("403 Forbidden", "InvalidAccessKeyId", vec![], vec!["does not know the access key"]),
        ("403 Forbidden", "SignatureDoesNotMatch", vec![], vec!["secret key"]),
        ("403 Forbidden", "RequestTimeTooSkewed", vec![], vec!["clock"]),
        ("403 Forbidden", "ExpiredToken", vec![], vec!["expired"]),
    ];
    for (status, code, headers, words) in cases {
        let body = document(code);
        let server = ScriptedServer::start(move |_| answer(status, &headers, body.as_bytes()));
        let origin = open(store(&server));
        let listed = origin.list("").try_next().await.expect_err(code).to_string();
        let read = origin.get("a", None, None).await.expect_err(code).to_string();
        for text in [listed, read] {
            for word in &words {
                assert!(text.contains(word), "{text:?} should say {word:?}");
            }
            assert!(!text.contains('<') && !text.contains(SECRET), "{text}");
        }
    }
}

/// On Linux a connection to `0.0.0.0` reaches this machine. Only the check keeps the client away.
#[tokio::test]
async fn addresses_that_are_refused_are_refused_at_the_start() {
    let hits = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&hits);
    let server = ScriptedServer::start(move |_| {
        counted.fetch_add(1, SeqCst);
        answer("200 OK", &[("ETag", "\"e\"")], BODY)
    });
    let port = server.address().port();
    let at = |endpoint: String, allow_link_local| OriginConfig {
        endpoint: Some(endpoint),
        allow_link_local,
        ..store(&server)
    };
    for host in
        ["0.0.0.0", "0", "[::]", "[::ffff:0.0.0.0]", "169.254.169.254", "0xa9fea9fe", "100.100.100.200"]
    {
        let config = at(format!("http://{host}:{port}"), false);
        let error = Origins::new(vec![config], limits(2_000)).expect_err(host);
        assert!(matches!(error, OriginError::Invalid { .. }), "{error:?}");
        let plain = OriginConfig {
            prefix: format!("http://{host}:{port}/d"),
            endpoint: None,
            credentials: None,
            ..store(&server)
        };
        Origins::new(vec![plain], limits(2_000)).expect_err(host);
    }
    let error = Origins::new(vec![at("http://169.254.169.254".to_owned(), false)], limits(2_000));
    let text = error.expect_err("link-local").to_string();
    assert!(text.contains("169.254.169.254") && text.contains("allow_link_local = true"), "{text}");
    Origins::new(vec![at("http://169.254.169.254".to_owned(), true)], limits(2_000)).expect("as configured");
    Origins::new(vec![at(format!("http://10.0.0.7:{port}"), false)], limits(2_000)).expect("private");
    assert_eq!(hits.load(SeqCst), 0);
}

/// Found by the fuzzer. The end of such a pause was a time that no clock can show.
#[tokio::test]
async fn an_origin_that_asks_for_an_endless_pause_is_throttled() {
    for long in ["9223372036854775808", "18446744073709551615", "Fri, 31 Dec 9999 23:59:59 GMT"] {
        let server = ScriptedServer::start(move |_| answer("503 Slow", &[("Retry-After", long)], b""));
        for config in [store(&server), plain(&server)] {
            let origin = open(config);
            for _ in 0..2 {
                let error = origin.get("x", None, None).await.expect_err("throttled");
                assert!(matches!(error, OriginError::Throttled { .. }), "{long}: {error:?}");
            }
        }
    }
}

/// Found by the fuzzer. URLs lose tabs and line breaks, so such a name would be `..`.
#[tokio::test]
async fn no_name_leads_out_of_the_prefix_of_a_plain_server() {
    let server = ScriptedServer::start(|_| answer("200 OK", &[("ETag", "\"e\"")], BODY));
    let prefix = format!("{}/pub", server.endpoint());
    let origin = open(OriginConfig { prefix, ..plain(&server) });
    origin.get("x", None, None).await.expect("read");
    for name in
        [".\t./secret", ".\r./secret", "a/.\n./.\t./secret", "%2e./secret", "..%2fsecret", ".\\./secret"]
    {
        if let Err(error) = origin.get(name, None, None).await {
            assert!(matches!(error, OriginError::Invalid { .. }), "{name:?}: {error:?}");
        }
        assert!(origin.head(name).await.is_err() || !name.contains(['\t', '\r', '\n']), "{name:?}");
    }
    let asked = server.heads();
    let outside = asked.iter().find(|head| !head.split(' ').nth(1).is_some_and(|at| at.starts_with("/pub/")));
    assert_eq!(outside, None, "{asked:#?}");
}

/// Every status and code of the class must be tried again, on reads and on writes.
#[tokio::test]
async fn answers_that_pass_are_tried_again_whatever_their_status() {
    let document = |code: &str| format!("<Error><Code>{code}</Code></Error>");
    let cases = [
        ("400 Bad", "RequestTimeout", false),
        ("409 Conflict", "OperationAborted", false),
        ("499 Gone", "", false),
        ("408 Late", "", false),
        ("500 Error", "InternalError", false),
        ("400 Bad", "SlowDown", true),
        ("403 Forbidden", "RequestLimitExceeded", true),
        ("400 Bad", "Throttling", true),
        ("400 Bad", "ThrottlingException", true),
        ("409 Conflict", "TooManyRequests", true),
        ("500 Error", "ServerBusy", true),
        ("503 Slow", "", true),
        ("429 Many", "", true),
    ];
    for (status, code, slows) in cases {
        let (body, asked) = (document(code), AtomicUsize::new(0));
        let server = ScriptedServer::start(move |head| {
            // The first answer to each call is the fault.
            if asked.fetch_add(1, SeqCst) % 2 == 0 {
                return answer(status, &[], body.as_bytes());
            }
            match head.starts_with("GET") {
                true if head.contains("list-type=2") => {
                    answer("200 OK", &[], b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")
                }
                true => {
                    let date = ("Last-Modified", "Sun, 06 Nov 1994 08:49:37 GMT");
                    answer("200 OK", &[("ETag", "\"e\""), date], BODY)
                }
                false => answer("200 OK", &[("ETag", "\"e\"")], b""),
            }
        });
        let origin = open(store(&server));
        origin.get("x", None, None).await.unwrap_or_else(|e| panic!("{status} {code}: {e}"));
        origin
            .put("x", "1".into(), fletch_origin::PutMode::Overwrite)
            .await
            .unwrap_or_else(|e| panic!("{status} {code}, a write: {e}"));
        let listed: Vec<_> = origin.list("").try_collect().await.expect("a listing");
        assert_eq!((listed.len(), server.heads().len()), (0, 6), "{status} {code}");

        let body = document(code);
        let server = ScriptedServer::start(move |_| answer(status, &[], body.as_bytes()));
        let error = open(store(&server)).get("x", None, None).await.expect_err("for ever");
        assert_eq!(matches!(error, OriginError::Throttled { .. }), slows, "{status} {code}: {error:?}");
        assert!(error.transient() && server.heads().len() > 1, "{status} {code}: {error:?}");
    }
}

/// The object decides what a 416 means: another attempt helps against a replica that is behind.
#[tokio::test]
async fn a_range_that_a_replica_does_not_have_is_tried_again() {
    let date = ("Last-Modified", "Sun, 06 Nov 1994 08:49:37 GMT");
    let head_of = move |length: &str, tag: &str| {
        answer("200 OK", &[("ETag", tag), ("Content-Length", length), date], b"")
    };
    let asked = AtomicUsize::new(0);
    let server = ScriptedServer::start(move |head| match asked.fetch_add(1, SeqCst) {
        _ if head.starts_with("HEAD") => head_of("20", "\"e\""),
        0 => answer("416 Range", &[("Content-Range", "bytes */5")], b""),
        _ => {
            let range = ("Content-Range", "bytes 10-19/20");
            answer("206 Partial Content", &[("ETag", "\"e\""), range, date], &BODY[10..])
        }
    });
    let got = open(store(&server)).get("x", Some(10..20), Some(&pin())).await.expect("the second attempt");
    assert_eq!((&*got.bytes, server.heads().len()), (&BODY[10..], 3));

    let server = ScriptedServer::start(move |head| match head.starts_with("HEAD") {
        true => head_of("5", "\"f\""),
        false => answer("416 Range", &[], b""),
    });
    let error = open(store(&server)).get("x", Some(10..20), Some(&pin())).await.expect_err("shorter");
    assert!(matches!(error, OriginError::Changed { .. }), "{error:?}");
    assert_eq!(server.heads().len(), 2, "one more request tells");

    let server = ScriptedServer::start(move |head| match head.starts_with("HEAD") {
        true => head_of("20", "\"e\""),
        false => answer("416 Range", &[], b""),
    });
    let error = open(store(&server)).get("x", Some(10..20), Some(&pin())).await.expect_err("for ever");
    assert!(matches!(error, OriginError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("416") && server.heads().len() <= 16, "attempts are bounded");
}

/// By code, whatever the status; and what is of the origin is told from what is of an object.
#[tokio::test]
async fn expired_credentials_are_known_by_their_code() {
    let sas = "<Error><Code>AuthenticationFailed</Code><AuthenticationErrorDetail>Signature not valid in the \
               specified time frame: Start [a] - Expiry [b]</AuthenticationErrorDetail></Error>";
    let cases = [
        ("400 Bad", "<Error><Code>ExpiredToken</Code></Error>"),
        ("403 Forbidden", "<Error><Code>ExpiredTokenException</Code></Error>"),
        ("400 Bad", "<Error><Code>TokenRefreshRequired</Code></Error>"),
        ("400 Bad", "<Error><Code>InvalidToken</Code></Error>"),
        ("403 Forbidden", "<Error><Code>RequestExpired</Code></Error>"),
        ("403 Forbidden", sas),
    ];
    for (status, body) in cases {
        let server = ScriptedServer::start(move |_| answer(status, &[], body.as_bytes()));
        let error = open(store(&server)).get("x", None, None).await.expect_err("expired");
        assert!(matches!(error, OriginError::Expired { is_given: false, .. }), "{body}: {error:?}");
        assert!(error.is_of_origin() && !error.transient(), "{error}");
        let text = error.to_string();
        assert!(text.contains("expired") && text.contains("new ones") && !text.contains("region"), "{text}");
        assert_eq!(server.heads().len(), 1, "{body}");

        // What a user handed over is handed over again.
        let origins = Origins::new(vec![], limits(2_000)).expect("right");
        let keys = [("aws_access_key_id", "AKIA"), ("aws_secret_access_key", SECRET)];
        let keys = keys.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let config = OriginConfig { credentials: None, ..store(&server) };
        let given = fletch_origin::Given::new(config, keys, None).expect("right");
        origins.give(given, 8).expect("taken");
        let origin = origins.open(&uri("s3://bucket")).expect("open");
        let error = origin.get("x", None, None).await.expect_err("expired");
        assert!(matches!(error, OriginError::Expired { is_given: true, .. }), "{error:?}");
        assert!(error.to_string().contains("run `fletch mount` again"), "{error}");
    }
    for (status, body, is_of_origin) in [
        ("403 Forbidden", "<Error><Code>AccessDenied</Code></Error>", false),
        ("403 Forbidden", "<Error><Code>InvalidAccessKeyId</Code></Error>", true),
        ("401 Unauthorized", "", true),
        ("407 Proxy", "", true),
        ("404 Not Found", "<Error><Code>NoSuchBucket</Code></Error>", true),
        ("404 Not Found", "<Error><Code>NoSuchKey</Code></Error>", false),
        ("301 Moved", "", true),
        ("409 Conflict", "<Error><Code>BlobArchived</Code></Error>", false),
        ("403 Forbidden", "<Error><Code>InvalidObjectState</Code></Error>", false),
    ] {
        let server = ScriptedServer::start(move |_| answer(status, &[], body.as_bytes()));
        let error = open(store(&server)).get("x", None, None).await.expect_err("a fault");
        assert_eq!(error.is_of_origin(), is_of_origin, "{status} {body}: {error:?}");
    }
}

/// A file whose credentials expired is read again at once, even when it was looked at a moment ago.
#[tokio::test]
async fn credentials_of_a_file_are_read_again_when_the_store_says_that_they_expired() {
    let dir = tempfile::tempdir().expect("tempdir");
    let file = dir.path().join("credentials");
    let text =
        |n: u32| format!("[default]\naws_access_key_id = AKIA{n}\naws_secret_access_key = hunter{n}\n");
    std::fs::write(&file, text(1)).expect("written");
    let server = ScriptedServer::start(move |head| {
        match header(head, "authorization").is_some_and(|value| value.contains("AKIA2/")) {
            true => {
                let date = ("Last-Modified", "Sun, 06 Nov 1994 08:49:37 GMT");
                answer("200 OK", &[("ETag", "\"e\""), date], BODY)
            }
            false => answer("400 Bad", &[], b"<Error><Code>ExpiredToken</Code></Error>"),
        }
    });
    let origin = open(OriginConfig { credentials: Some(Credentials::File(file.clone())), ..store(&server) });
    origin.get("x", None, None).await.expect_err("the first key has expired");
    std::fs::write(dir.path().join("new"), text(2)).expect("written");
    std::fs::rename(dir.path().join("new"), &file).expect("swapped");
    origin.get("x", None, None).await.expect("read with the new key");
    // Both checks of the file came within the second of its interval.
    assert!(server.heads().len() <= 3, "{:#?}", server.heads());
}

#[tokio::test]
async fn every_store_is_asked_for_the_stored_bytes() {
    let date = ("Last-Modified", "Sun, 06 Nov 1994 08:49:37 GMT");
    let server = ScriptedServer::start(move |_| answer("200 OK", &[("ETag", "\"e\""), date], BODY));
    for (_, origin) in every_kind(&server) {
        let before = server.heads().len();
        origin.get("x", None, None).await.expect("read");
        origin.head("x").await.expect("head");
        // GCS decompresses for a client that does not name gzip.
        let is_gcs = origin.uri().to_string().starts_with("gs:");
        let codings = if is_gcs { "gzip, identity" } else { "identity" };
        let heads = server.heads().split_off(before);
        assert_eq!(heads.len(), 2);
        for head in heads {
            assert_eq!(header(&head, "accept-encoding"), Some(codings), "{head}");
        }
    }
}

//! Answers of a foreign store: status, headers and body of a GET, and pages of listings.

use crate::plant;
use bytes::Bytes;
use fletch_origin::{Credentials, Origin, OriginConfig, OriginLimits, OriginUri, Origins};
use futures::StreamExt as _;
use parking_lot::Mutex;
use std::{sync::LazyLock, time::Duration};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    runtime::{Builder, Runtime},
};

/// The most entries that are read of a listing: a store may say that its listing never ends.
const ENTRIES_MAX: usize = 100;

static ANSWER: Mutex<Bytes> = Mutex::new(Bytes::new());

struct Store {
    runtime: Runtime,
    endpoint: String,
    origins: Mutex<[Origin; 2]>,
}

static STORE: LazyLock<Store> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    drop(runtime.spawn(serve(listener)));
    let origins = Mutex::new(open(&endpoint));
    Store { runtime, endpoint, origins }
});

/// Opens the store as a bucket and as a plain server.
fn open(endpoint: &str) -> [Origin; 2] {
    let bucket = OriginConfig {
        prefix: "s3://bucket".into(),
        endpoint: Some(endpoint.to_owned()),
        region: Some("us-east-1".into()),
        credentials: Some(Credentials::Anonymous),
        allow_http: true,
        ..OriginConfig::default()
    };
    let plain = OriginConfig { prefix: endpoint.to_owned(), allow_http: true, ..OriginConfig::default() };
    let limits =
        OriginLimits { attempts_max: 1, io_timeout: Duration::from_millis(500), ..OriginLimits::default() };
    let origins = Origins::new(vec![bucket, plain], limits).expect("origins");
    ["s3://bucket", endpoint]
        .map(|uri| origins.open(&OriginUri::parse(uri).expect("a URI")).expect("an origin"))
}

/// Sends the bytes of [`ANSWER`] to whoever sends a request, and closes the connection.
async fn serve(listener: TcpListener) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let mut head = Vec::new();
        while !head.windows(4).any(|w| w == b"\r\n\r\n") {
            if stream.read_buf(&mut head).await.unwrap_or(0) == 0 {
                break;
            }
        }
        let answer = ANSWER.lock().clone();
        drop(stream.write_all(&answer).await);
        drop(stream.shutdown().await);
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let page = "<?xml version=\"1.0\"?><ListBucketResult><Name>bucket</Name><Prefix></Prefix><KeyCount>1\
        </KeyCount><IsTruncated>false</IsTruncated><Contents><Key>a/b</Key><LastModified>\
        2024-01-02T03:04:05.000Z</LastModified><ETag>&quot;x&quot;</ETag><Size>3</Size></Contents>\
        </ListBucketResult>";
    let error = "<Error><Code>SlowDown</Code><Message>m</Message></Error>";
    [
        "HTTP/1.1 206 Partial Content\r\nContent-Length: 3\r\nContent-Range: bytes 2-4/9\r\nETag: \"e\"\r\n\
            Last-Modified: Tue, 02 Jan 2024 03:04:05 GMT\r\n\r\nabc"
            .to_owned(),
        format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: {}\r\n\r\n{page}",
            page.len()
        ),
        format!("HTTP/1.1 503 Slow\r\nRetry-After: 0\r\nContent-Length: {}\r\n\r\n{error}", error.len()),
        "HTTP/1.1 503 Slow\r\nRetry-After: 9223372036854775808\r\nContent-Length: 0\r\n\r\n".to_owned(),
        "HTTP/1.1 302 Found\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n".to_owned(),
        "HTTP/1.1 416 Past\r\nContent-Range: bytes */2\r\nContent-Length: 0\r\n\r\n".to_owned(),
        "HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\nContent-Range: bytes 2-4/*\r\n\r\n\
            3\r\nabc\r\n0\r\n\r\n"
            .to_owned(),
    ]
    .map(String::into_bytes)
    .to_vec()
}

/// The answer to a range has the bytes of that range or is an error; a page of a listing is read or refused.
pub fn run(input: &[u8]) -> bool {
    let store = &*STORE;
    *ANSWER.lock() = Bytes::copy_from_slice(input);
    let mut origins = store.origins.lock();
    let accepted = store.runtime.block_on(async {
        let mut accepted = false;
        for origin in origins.iter() {
            if let Ok(found) = origin.get("a/b", Some(2..5), None).await {
                accepted = true;
                assert_eq!(found.bytes.len(), 3, "other bytes than the range");
                plant::bug(found.meta.size > 9);
            }
        }
        let listed: Vec<_> = origins[0].list("").take(ENTRIES_MAX).collect().await;
        plant::bug(listed.iter().any(|l| l.as_ref().is_ok_and(|l| l.path != "a/b")));
        accepted | listed.iter().any(Result::is_ok)
    });
    // After a refusal an origin sends fewer requests, for a minute. The next input must not wait.
    if ["503", "429"].iter().any(|s| input.get(9..12) == Some(s.as_bytes())) {
        *origins = open(&store.endpoint);
    }
    accepted
}

use super::*;
use crate::{Backing, Counts, EmulatorConfig, Fault, OriginEmulator, seeds};
use rand::{Rng as _, RngCore as _};
use std::io::{Read as _, Write as _};
use std::time::Duration;

/// Sends a request on a new connection. Returns the body, and the end of reading it.
fn get(address: SocketAddr, path: &str) -> (Vec<u8>, Result<(), io::ErrorKind>) {
    let mut stream = std::net::TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(Duration::from_millis(500))).expect("a timeout");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").expect("sent");
    let mut all = Vec::new();
    let end = stream.read_to_end(&mut all).map(|_| ()).map_err(|e| e.kind());
    let head = all.windows(4).position(|w| w == b"\r\n\r\n").map_or(all.len(), |i| i + 4);
    (all.split_off(head), end)
}

fn pair(bytes: &[u8]) -> (OriginEmulator, TamperProxy) {
    let emulator = OriginEmulator::start(EmulatorConfig::default(), Backing::empty());
    emulator.insert("a", bytes.to_vec());
    let proxy = TamperProxy::start(Upstream::Tcp(emulator.address()));
    (emulator, proxy)
}

#[test]
fn a_proxy_changes_exactly_what_it_was_told() {
    let mut rng = seeds::rng(seeds::seed());
    let mut bytes = vec![0; 300_000];
    rng.fill_bytes(&mut bytes);
    let (emulator, proxy) = pair(&bytes);
    assert_eq!(get(proxy.address(), "/bucket/a"), (bytes.clone(), Ok(())));
    for _ in 0..8 {
        let (byte, bit) = (rng.random_range(0..bytes.len()), rng.random_range(0..8));
        proxy.set("/a", Tamper::FlipBit { byte: byte as u64, bit }, Some(1));
        let (got, end) = get(proxy.address(), "/bucket/a");
        let mut wrong = bytes.clone();
        wrong[byte] ^= 1 << bit;
        assert_eq!(end, Ok(()));
        assert!(got == wrong, "not exactly bit {bit} of byte {byte}");
    }
    assert_eq!((proxy.responses(), proxy.tampered()), (9, 8));
    proxy.set("/other", Tamper::Cut { after: 0 }, None);
    assert_eq!(get(proxy.address(), "/bucket/a").0, bytes);
    proxy.set("/a", Tamper::FlipBit { byte: 300_000, bit: 0 }, None);
    assert_eq!(get(proxy.address(), "/bucket/a").0, bytes, "past the end nothing is changed");
    assert_eq!(proxy.tampered(), 8);
    assert_eq!(emulator.counts().gets["a"], proxy.responses());
}

#[test]
fn a_proxy_cuts_and_stalls() {
    let bytes = vec![7; 100_000];
    let (_emulator, proxy) = pair(&bytes);
    for after in [0, 1, 65_536, 99_999] {
        proxy.clear();
        proxy.set("/a", Tamper::Cut { after }, Some(1));
        let (got, _) = get(proxy.address(), "/bucket/a");
        assert_eq!(got.len() as u64, after);
        proxy.set("/a", Tamper::Stall { after }, Some(1));
        let (got, end) = get(proxy.address(), "/bucket/a");
        assert_eq!(end, Err(io::ErrorKind::WouldBlock), "the connection stays open");
        assert_eq!(got.len() as u64, after);
    }
    assert_eq!(proxy.tampered(), 8);
    assert_eq!(get(proxy.address(), "/bucket/a").0, bytes);
}

#[test]
fn a_proxy_reaches_unix_sockets_and_says_when_nobody_is_there() {
    let dir = tempfile::tempdir().expect("tempdir");
    let path = dir.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accepted");
        let mut request = [0; 1024];
        let n = stream.read(&mut request).expect("a request");
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi").expect("answered");
        String::from_utf8_lossy(&request[..n]).into_owned()
    });
    let proxy = TamperProxy::start(Upstream::Unix(path.clone()));
    assert_eq!(get(proxy.address(), "/x").0, b"hi");
    assert!(server.join().expect("served").starts_with("GET /x HTTP/1.1\r\n"));
    std::fs::remove_file(path).expect("removed");
    let (body, _) = get(proxy.address(), "/x");
    assert!(String::from_utf8_lossy(&body).starts_with("proxy: "), "{body:?}");
}

#[test]
fn an_emulator_counts_exactly_and_its_faults_end() {
    let (emulator, _proxy) = pair(b"0123456789");
    let at = emulator.address();
    assert_eq!(get(at, "/bucket/a").0, b"0123456789");
    emulator.set_fault("a", Fault::FlipBit { byte: 3 }, Some(1));
    assert_eq!(get(at, "/bucket/a").0, b"0122456789");
    emulator.set_fault("a", Fault::Truncate { after: 4 }, Some(1));
    assert_eq!(get(at, "/bucket/a").0, b"0123");
    emulator.set_fault("a", Fault::StallAfter(2), Some(1));
    assert_eq!(get(at, "/bucket/a"), (b"01".to_vec(), Err(io::ErrorKind::WouldBlock)));
    emulator.set_fault("b", Fault::Stall, None);
    assert_eq!(get(at, "/bucket/a").0, b"0123456789");
    assert!(String::from_utf8_lossy(&get(at, "/bucket/none").0).contains("<Code>NoSuchKey</Code>"));
    assert!(String::from_utf8_lossy(&get(at, "/other/a").0).contains("<Code>NoSuchBucket</Code>"));
    emulator.insert("x<&>'\"é", "");
    let page = String::from_utf8_lossy(&get(at, "/bucket?list-type=2&max-keys=1").0).into_owned();
    assert!(page.contains("<Key>a</Key>") && page.contains("<NextContinuationToken>a</"), "{page}");
    let page = String::from_utf8_lossy(&get(at, "/bucket?list-type=2&continuation-token=a").0).into_owned();
    assert!(page.contains("&lt;&amp;&gt;") && page.contains("<IsTruncated>false</"), "{page}");
    let gets = [("a".to_owned(), 6), ("none".to_owned(), 1)].into();
    assert_eq!(
        emulator.counts(),
        Counts { get: 7, list: 2, lists_at_once: 1, refused: 2, bytes_sent: 36, gets, ..Counts::default() }
    );
    emulator.reset_counts();
    assert_eq!(emulator.counts().requests(), 0);
}

use super::*;
use std::io::Read as _;
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

const STRICT: AddressRule = AddressRule { allow_link_local: false };
const OPEN: AddressRule = AddressRule { allow_link_local: true };

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

#[test]
fn link_local_metadata_unspecified_and_multicast_addresses_are_refused() {
    use AddressClass::{LinkLocal, Metadata, Multicast, Unspecified};
    let cases = [
        ("169.254.169.254", LinkLocal),
        ("169.254.0.1", LinkLocal),
        ("169.254.170.2", LinkLocal),
        ("fe80::1", LinkLocal),
        ("febf::1", LinkLocal),
        ("fd00:ec2::254", Metadata),
        ("fd20:ce::254", Metadata),
        ("168.63.129.16", Metadata),
        ("100.100.100.200", Metadata),
        ("192.0.0.192", Metadata),
        ("0.0.0.0", Unspecified),
        ("0.1.2.3", Unspecified),
        ("::", Unspecified),
        ("224.0.0.1", Multicast),
        ("239.255.255.250", Multicast),
        ("255.255.255.255", Multicast),
        ("ff02::1", Multicast),
        ("::ffff:169.254.169.254", LinkLocal),
        ("::ffff:0.0.0.0", Unspecified),
        ("::ffff:168.63.129.16", Metadata),
        ("::169.254.169.254", LinkLocal),
        ("64:ff9b::169.254.169.254", LinkLocal),
        ("2002:a9fe:a9fe::1", LinkLocal),
    ];
    for (text, class) in cases {
        let refused = STRICT.check(ip(text)).expect_err(text);
        assert_eq!(refused, RefusedAddress { address: ip(text), class }, "{text}");
        let opened = matches!(class, LinkLocal | Metadata);
        assert_eq!(OPEN.check(ip(text)).is_ok(), opened, "{text}");
        assert_eq!(refused.to_string().contains("allow_link_local = true"), opened, "{refused}");
    }
    for text in [
        "127.0.0.1",
        "::1",
        "10.0.0.7",
        "172.16.3.4",
        "192.168.1.1",
        "100.64.0.1",
        "fd12:3456::1",
        "52.216.1.1",
        "2600::1",
        "::ffff:10.0.0.7",
        "::ffff:127.0.0.1",
        "64:ff9b::8.8.8.8",
    ] {
        assert_eq!(STRICT.check(ip(text)), Ok(()), "{text}");
    }
}

#[test]
fn every_spelling_of_an_address_is_checked() {
    for host in [
        "169.254.169.254",
        "169.254.169.254.",
        "2852039166",
        "0xa9fea9fe",
        "0xA9.0xFE.0xA9.0xFE",
        "0251.0376.0251.0376",
        "169.16689662",
        "[::ffff:169.254.169.254]",
        "[::ffff:a9fe:a9fe]",
        "[0:0:0:0:0:ffff:a9fe:a9fe]",
        "0",
        "0x0",
        "0.0.0.0",
        "[::]",
        "[fe80::1]",
        "%31%36%39.254.169.254",
    ] {
        let url = url::Url::parse(&format!("http://{host}:80/latest")).expect(host);
        STRICT.check_host(&url).expect_err(host);
    }
    for host in ["127.0.0.1", "2130706433", "[::1]", "files.example", "10.0.0.7"] {
        let url = url::Url::parse(&format!("http://{host}/x")).expect(host);
        assert_eq!(STRICT.check_host(&url), Ok(()), "{host}");
    }
}

/// Resolves a name to another address each time.
struct Rebinding(Vec<&'static str>, AtomicUsize);

impl Resolve for Rebinding {
    fn resolve(&self, _: Name) -> Resolving {
        let at = self.1.fetch_add(1, SeqCst);
        let found: Vec<SocketAddr> =
            self.0[at % self.0.len()].split(' ').map(|a| SocketAddr::new(ip(a), 0)).collect();
        Box::pin(std::future::ready(Ok(Box::new(found.into_iter()) as Addrs)))
    }
}

/// The client connects to the addresses that were checked, so a second answer of the name server is checked
/// like the first. On Linux `0.0.0.0` reaches the listener: only the check keeps the client away.
#[tokio::test]
async fn a_name_that_is_rebound_reaches_no_refused_address() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let accepted = std::thread::spawn(move || {
        let mut heads = Vec::new();
        for stream in listener.incoming().take(2) {
            let mut stream = stream.expect("a connection");
            let mut head = [0; 512];
            let read = stream.read(&mut head).expect("a request");
            heads.push(String::from_utf8_lossy(&head[..read]).into_owned());
            let answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
            std::io::Write::write_all(&mut stream, answer.as_bytes()).expect("sent");
        }
        heads
    });
    let answers = vec!["127.0.0.1", "0.0.0.0", "169.254.169.254 0.0.0.0", "0.0.0.0 127.0.0.1"];
    let inner = Arc::new(Rebinding(answers, AtomicUsize::new(0)));
    let client = reqwest::Client::builder()
        .no_proxy()
        .pool_max_idle_per_host(0)
        .dns_resolver(Arc::new(CheckedResolver { inner, rule: STRICT }))
        .build()
        .expect("a client");
    let get = |path: &str| client.get(format!("http://store.example:{port}/{path}")).send();
    assert_eq!(get("first").await.expect("loopback is allowed").status(), 200);
    for path in ["second", "third"] {
        let error = get(path).await.expect_err("refused");
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
        let mut found = None;
        while let Some(next) = cause {
            found = found.or(next.downcast_ref::<RefusedAddress>());
            cause = next.source();
        }
        assert!(found.is_some(), "{error:?}");
    }
    assert_eq!(get("fourth").await.expect("the allowed address of two").status(), 200);
    let heads = accepted.join().expect("the listener");
    assert!(heads[0].starts_with("GET /first ") && heads[1].starts_with("GET /fourth "), "{heads:?}");
}

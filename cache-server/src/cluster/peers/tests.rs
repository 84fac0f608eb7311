//! Answers of members, rests of silent ones, and where the token goes.

use super::*;
use fletch_testkit::scripted::{self, ScriptedServer};

pub(super) fn peers(config: &PeerConfig) -> Peers {
    let id = MemberId::new("a").expect("a name");
    let view = Arc::new(ClusterView::single(id, "http://127.0.0.1:1".into()));
    Peers::new(config, watch::Sender::new(view).subscribe()).expect("a client")
}

pub(super) fn open() -> PeerConfig {
    PeerConfig::default()
}

pub(super) fn to(url: &str) -> PeerAddress {
    PeerAddress { id: MemberId::new("b").expect("a name"), url: url.to_owned() }
}

pub(super) fn request(len: u32) -> PeerRequest {
    PeerRequest {
        path: "/v1/peers/versions/r/chunks/h".into(),
        domain: Domain::default_domain(),
        dataset: "d".into(),
        job: "j".into(),
        len,
        part: None,
        call: PeerCall::Get,
        only_if_cached: true,
    }
}

fn soon() -> Deadline {
    Deadline::now() + Duration::from_secs(5)
}

#[test]
fn i2_a_token_goes_over_tls_or_to_this_machine() {
    for safe in ["https://srv-1:7380", "http://127.0.0.1:7380", "http://[::1]:7380", "http://localhost:1"] {
        assert!(is_safe(safe), "{safe}");
    }
    for unsafe_url in ["http://10.0.0.1:7380", "http://localhost.example:1", "http://[::2]:1", "nonsense"] {
        assert!(!is_safe(unsafe_url), "{unsafe_url}");
    }
}

#[tokio::test]
async fn answers_are_told_apart_and_bounded() {
    let view = ("Fletch-View", "9");
    let wrong = serde_json::to_vec(&Problem::new(Code::WrongServer, "d", "h")).expect("JSON");
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (scripted::answer("200 OK", &[("Fletch-Result", "miss")], b"bytes"), "miss"),
        (scripted::answer("200 OK", &[("Fletch-Result", "hit")], b"more bytes"), "failed"),
        (scripted::answer("200 OK", &[], b"bytes"), "failed"),
        (scripted::answer("404 Not Found", &[], b""), "absent"),
        (scripted::answer("429 Too Many", &[("Retry-After", "3")], b""), "overloaded"),
        (scripted::answer("503 Unavailable", &[], b""), "failed"),
        (scripted::answer("421 Misdirected", &[view], b"{}"), "failed"),
        (
            scripted::answer("421 Misdirected", &[view, ("Fletch-Owner", "c http://10.0.0.3:1")], &wrong),
            "wrong_server",
        ),
    ];
    for (answer, word) in cases {
        let server = ScriptedServer::start(move |_| answer.clone());
        let peers = peers(&open());
        let got = peers.ask(&to(&server.endpoint()), &request(5), soon()).await;
        assert_eq!(got.word(), word, "{got:?}");
        assert!(peers.may_ask(&to("").id), "whoever answers need not rest");
        match got {
            PeerAnswer::WrongServer(view, owner) => {
                let owner = owner.expect("named");
                assert_eq!((view, owner.id.as_str(), &*owner.url), (9, "c", "http://10.0.0.3:1"));
            }
            PeerAnswer::Overloaded(wait) => assert_eq!(wait, Duration::from_secs(3)),
            _ => {}
        }
        let head = server.heads().concat().to_lowercase();
        assert!(head.contains("fletch-domain: default") && head.contains("only-if-cached"), "{head}");
        assert_eq!(peers.stats()[0].answers, [(word, 1)]);
    }
}

#[tokio::test]
async fn a_part_of_a_chunk_is_asked_for_and_a_whole_one_is_not_read() {
    let hit = ("Fletch-Result", "hit");
    let cases: Vec<(Vec<u8>, Option<&[u8]>)> = vec![
        (scripted::answer("206 Partial Content", &[hit], b"cde"), Some(b"cde")),
        (scripted::answer("206 Partial Content", &[hit], b"cdef"), None),
        (scripted::answer("200 OK", &[hit], b"abcdefgh"), None),
    ];
    for (answer, want) in cases {
        let server = ScriptedServer::start(move |_| answer.clone());
        let request = PeerRequest { part: Some(2..5), ..request(3) };
        let answer = peers(&open()).ask(&to(&server.endpoint()), &request, soon()).await;
        let got = if let PeerAnswer::Bytes(bytes, AtPeer::Hit) = answer { Some(bytes) } else { None };
        assert_eq!(got.as_deref(), want);
        assert!(server.heads().concat().to_lowercase().contains("range: bytes=2-4"));
    }
    let server = ScriptedServer::start(move |_| scripted::answer("206 Partial Content", &[hit], b"bytes"));
    let answer = peers(&open()).ask(&to(&server.endpoint()), &request(5), soon()).await;
    assert!(matches!(answer, PeerAnswer::Failed), "nobody asked for a part");
}

#[tokio::test]
async fn i1_a_silent_member_rests_and_longer_each_time() {
    let peers = peers(&open());
    // Nobody listens on this port of the loopback interface.
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", free.local_addr().expect("an address"));
    drop(free);
    let state = peers.state(&to(&url).id);
    for seconds in [2, 4, 8, 10, 10] {
        assert!(matches!(peers.ask(&to(&url), &request(5), soon()).await, PeerAnswer::Failed));
        assert!(!peers.may_ask(&to(&url).id));
        let mut rest = state.rest.lock();
        assert_eq!(rest.last, Duration::from_secs(seconds));
        rest.until = Some(Instant::now());
    }
    let server = ScriptedServer::start(|_| scripted::answer("404 Not Found", &[], b""));
    peers.ask(&to(&server.endpoint()), &request(5), soon()).await;
    assert_eq!(state.rest.lock().last, Duration::ZERO);
}

#[tokio::test]
async fn i2_no_token_goes_to_an_unsafe_url_and_a_new_one_is_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("token");
    std::fs::write(&file, "old\n").expect("write");
    let peers = peers(&PeerConfig { token_file: Some(file.clone()), ..PeerConfig::default() });
    let unsafe_url = to("http://192.0.2.1:7380");
    assert!(matches!(peers.ask(&unsafe_url, &request(5), soon()).await, PeerAnswer::Failed));
    peers.token.grow_old();
    std::fs::write(&file, "new\n").expect("write");
    let server = ScriptedServer::start(|head| match scripted::header(head, "authorization") {
        Some("Bearer new") => scripted::answer("404 Not Found", &[], b""),
        _ => scripted::answer("401 Unauthorized", &[], b""),
    });
    assert!(matches!(peers.ask(&to(&server.endpoint()), &request(5), soon()).await, PeerAnswer::Absent));
    assert!(!format!("{peers:?}").contains("new"), "nothing shows a token");
}

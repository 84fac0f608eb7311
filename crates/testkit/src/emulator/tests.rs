//! What each manner puts on the wire, read without a client library.

use super::*;
use serde::Deserialize;
use std::io::{Read as _, Write as _};

/// A response as it came: the head, and the body without chunks.
struct Raw {
    status: u16,
    head: String,
    body: String,
}

impl Raw {
    fn header(&self, name: &str) -> Option<&str> {
        crate::scripted::header(&self.head, name)
    }
}

/// Sends a request. `more` are header lines.
fn send(origin: &OriginEmulator, line: &str, more: &[&str], body: &str) -> Option<Raw> {
    let mut stream = TcpStream::connect(origin.address()).ok()?;
    let host = if more.iter().any(|header| header.starts_with("Host:")) { "" } else { "Host: 127.0.0.1\r\n" };
    let more: String = more.iter().map(|header| format!("{header}\r\n")).collect();
    let length = body.len();
    let text =
        format!("{line} HTTP/1.1\r\n{host}Connection: close\r\nContent-Length: {length}\r\n{more}\r\n{body}");
    stream.write_all(text.as_bytes()).ok()?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8(bytes).expect("UTF-8");
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Raw { status, head: head.to_owned(), body: body.to_owned() })
}

fn get(origin: &OriginEmulator, path: &str, more: &[&str]) -> Raw {
    send(origin, &format!("GET {path}"), more, "").expect("an answer")
}

#[derive(Deserialize, Debug)]
#[serde(rename_all = "PascalCase")]
struct Listed {
    is_truncated: bool,
    next_continuation_token: Option<String>,
    next_marker: Option<String>,
    #[serde(default)]
    contents: Vec<Content>,
    #[serde(default)]
    common_prefixes: Vec<Prefix>,
}

#[derive(Deserialize, Debug)]
#[serde(rename_all = "PascalCase")]
struct Content {
    key: String,
    size: u64,
}

#[derive(Deserialize, Debug)]
#[serde(rename_all = "PascalCase")]
struct Prefix {
    prefix: String,
}

impl Listed {
    fn keys(&self) -> Vec<&str> {
        self.contents.iter().map(|content| content.key.as_str()).collect()
    }
}

fn list(origin: &OriginEmulator, query: &str) -> Listed {
    let raw = get(origin, &format!("/bucket?{query}"), &[]);
    assert_eq!(raw.status, 200, "{}", raw.body);
    quick_xml::de::from_str(&raw.body).unwrap_or_else(|e| panic!("{e}: {}", raw.body))
}

/// An origin with the keys `k0` to `k6` and these manners. A page has three keys.
fn seven(manners: Manners) -> OriginEmulator {
    let config =
        EmulatorConfig { manners: Manners { page_keys: Some(3), ..manners }, ..EmulatorConfig::default() };
    let origin = OriginEmulator::start(config, Backing::empty());
    for i in 0..7 {
        origin.insert(&format!("k{i}"), vec![b'x'; i]);
    }
    origin
}

fn paging(paging: Paging) -> OriginEmulator {
    seven(Manners { paging, ..Manners::default() })
}

/// Follows the tokens of a listing for at most `pages` pages. Returns the keys, and whether it ended.
fn follow(origin: &OriginEmulator, pages: usize) -> (Vec<String>, bool) {
    let (mut keys, mut token) = (Vec::new(), String::new());
    for _ in 0..pages {
        let page = list(origin, &format!("list-type=2{token}"));
        keys.extend(page.contents.iter().map(|content| content.key.clone()));
        match page.next_continuation_token.filter(|token| !token.is_empty()) {
            Some(next) => token = format!("&continuation-token={}", next.replace('!', "%21")),
            None => return (keys, !page.is_truncated),
        }
    }
    (keys, false)
}

const ALL: [&str; 7] = ["k0", "k1", "k2", "k3", "k4", "k5", "k6"];

#[test]
fn tokens_and_pages_without_keys_lead_through_a_listing() {
    for manner in [Paging::Tokens, Paging::EmptyPages(2), Paging::EmptyTokenElement] {
        let (keys, ended) = follow(&paging(manner), 20);
        assert!(ended && keys == ALL, "{manner:?}: {keys:?}");
    }
    let origin = paging(Paging::EmptyPages(2));
    follow(&origin, 20);
    assert_eq!(origin.counts().list, 7, "two pages without keys before each of the last two");
    let (keys, ended) = follow(&paging(Paging::RepeatLastKey), 20);
    assert!(ended && keys == ["k0", "k1", "k2", "k2", "k3", "k4", "k5", "k5", "k6"], "{keys:?}");
    let raw = get(&paging(Paging::EmptyTokenElement), "/bucket?list-type=2&start-after=k5", &[]);
    assert!(raw.body.contains("<NextContinuationToken></NextContinuationToken>"), "{}", raw.body);
}

#[test]
fn listings_without_end_never_end() {
    for (manner, keys_seen) in
        [(Paging::TokenAtEnd, 7), (Paging::EndlessEmptyPages, 3), (Paging::SamePage, 60)]
    {
        let (keys, ended) = follow(&paging(manner), 20);
        assert!(!ended && keys.len() == keys_seen, "{manner:?}: {keys:?}");
    }
    let last = list(&paging(Paging::TokenAtEnd), "list-type=2&continuation-token=0%21k5");
    assert!(
        last.keys() == ["k6"] && !last.is_truncated && last.next_continuation_token.is_some(),
        "{last:?}"
    );
}

#[test]
fn truncated_listings_without_a_token_go_on_by_a_key() {
    let origin = paging(Paging::NoToken);
    let first = list(&origin, "list-type=2");
    assert!(first.is_truncated && first.next_continuation_token.is_none(), "{first:?}");
    assert_eq!(list(&origin, "list-type=2&start-after=k2").keys(), ["k3", "k4", "k5"]);
    assert_eq!(list(&origin, "marker=k5").keys(), ["k6"]);
    for next_marker in [false, true] {
        let origin = paging(Paging::Markers { next_marker });
        let first = list(&origin, "list-type=2&start-after=k5&continuation-token=k5");
        assert_eq!((first.keys(), first.is_truncated), (vec!["k0", "k1", "k2"], true));
        assert_eq!(first.next_marker.as_deref(), next_marker.then_some("k2"));
        assert!(first.next_continuation_token.is_none());
        let last = list(&origin, "list-type=2&marker=k5");
        assert_eq!((last.keys(), last.is_truncated), (vec!["k6"], false));
    }
}

#[test]
fn orders_other_than_bytes_are_listed_whole() {
    for order in [KeyOrder::Shuffled, KeyOrder::SlashFirst, KeyOrder::SlashLast, KeyOrder::Utf16] {
        let origin = seven(Manners { order, ..Manners::default() });
        origin.insert("k1/x", "x");
        let (mut keys, ended) = follow(&origin, 20);
        match order {
            KeyOrder::Shuffled => assert_ne!(keys[..7], ALL, "{keys:?}"),
            KeyOrder::SlashLast => assert_eq!(keys[..3], ["k0", "k1", "k1/x"]),
            _ => assert_eq!(keys[1..3], ["k1", "k1/x"]),
        }
        keys.sort();
        assert!(ended && keys.len() == 8, "{order:?}: {keys:?}");
    }
}

#[test]
fn forms_of_xml_say_the_same() {
    let keys = ["a b&c<d>\"e\"", "x]]>y", "z/1"];
    for xml in [XmlForm::Plain, XmlForm::Pretty, XmlForm::Attributes, XmlForm::Cdata, XmlForm::References] {
        let manners = Manners { xml, ..Manners::default() };
        let config = EmulatorConfig { manners, ..EmulatorConfig::default() };
        let origin = OriginEmulator::start(config, Backing::empty());
        keys.iter().for_each(|key| origin.insert(key, "1234"));
        let page = list(&origin, "list-type=2");
        assert_eq!(page.keys(), keys, "{xml:?}");
        assert!(page.contents.iter().all(|content| content.size == 4), "{xml:?}: {page:?}");
    }
    let body = |xml| get(&seven(Manners { xml, ..Manners::default() }), "/bucket?list-type=2", &[]).body;
    assert!(body(XmlForm::Prefixed).contains("<s3:Contents><s3:Key>k0</s3:Key>"));
    let unknown = body(XmlForm::UnknownElements);
    assert!(unknown.contains("<RestoreStatus><Key>not/a/key</Key></RestoreStatus>"), "{unknown}");
}

#[test]
fn keys_are_encoded_as_the_store_likes() {
    let origin = seven(Manners::default());
    origin.insert("a b/\u{1}\n", "x");
    let key = |encoding, query: &str| {
        origin.set_manners(Manners { encoding, ..Manners::default() });
        let body = get(&origin, &format!("/bucket?prefix=a{query}"), &[]).body;
        let key = body.split("<Key>").nth(1).and_then(|rest| rest.split("</Key>").next()).map(str::to_owned);
        (key.expect("a key"), body.contains("<EncodingType>url</EncodingType>"))
    };
    let (plain, encoded) = ("a b/&#x1;\n".to_owned(), "a%20b%2F%01%0A".to_owned());
    assert_eq!(key(KeyEncoding::WhenAsked, ""), (plain.clone(), false));
    assert_eq!(key(KeyEncoding::WhenAsked, "&encoding-type=url"), (encoded.clone(), true));
    assert_eq!(key(KeyEncoding::Always, ""), (encoded, true));
    assert_eq!(key(KeyEncoding::Never, "&encoding-type=url"), (plain, false));
}

#[test]
fn tags_and_times_differ_between_listing_and_answer() {
    let listed = Described { tag: TagForm::Absent, time: TimeForm::Epoch };
    let answered = Described { tag: TagForm::Weak, time: TimeForm::Absent };
    let origin = seven(Manners { listed, answered, ..Manners::default() });
    let body = get(&origin, "/bucket?list-type=2", &[]).body;
    assert!(!body.contains("ETag"), "{body}");
    let time = body.split("<LastModified>").nth(1).and_then(|rest| rest.split('<').next()).expect("a time");
    assert!(time.parse::<u64>().is_ok(), "{time}");
    let answer = get(&origin, "/bucket/k3", &[]);
    let tag = answer.header("etag").expect("a tag").to_owned();
    assert!(tag.starts_with("W/\"") && answer.header("last-modified").is_none(), "{}", answer.head);
    assert_eq!(get(&origin, "/bucket/k3", &[&format!("If-Match: {tag}")]).status, 200);
    assert_eq!(get(&origin, "/bucket/k3", &[&format!("If-Match: {}", &tag[2..])]).status, 412);
    origin.set_manners(Manners::default());
    assert_eq!(get(&origin, "/bucket/k3", &[]).header("etag"), Some(&tag[2..]));
}

#[test]
fn folders_are_objects_or_prefixes() {
    let origin = seven(Manners::default());
    origin.console_folder("k1");
    let (keys, _) = follow(&origin, 9);
    assert!(keys.contains(&"k1/".to_owned()), "{keys:?}");
    assert_eq!(
        get(&origin, "/bucket/k1/", &[]).header("content-type"),
        Some("application/x-directory; charset=UTF-8")
    );
    origin.set_manners(Manners { folders_as_prefixes: true, ..Manners::default() });
    let page = list(&origin, "list-type=2");
    assert_eq!(page.keys(), ALL);
    assert_eq!(page.common_prefixes.iter().map(|p| p.prefix.as_str()).collect::<Vec<_>>(), ["k1/"]);
}

#[test]
fn refusals_come_once_and_outages_stay() {
    let origin = seven(Manners::default());
    let stale = Refusal::new(416, "InvalidRange").with("Content-Range", "bytes */9");
    origin.set_fault("k3", Fault::Refuse(stale), Some(1));
    let once = get(&origin, "/bucket/k3", &[]);
    assert_eq!((once.status, once.header("content-range")), (416, Some("bytes */9")));
    assert!(once.body.contains("<Code>InvalidRange</Code>"), "{}", once.body);
    assert_eq!(get(&origin, "/bucket/k3", &[]).status, 200);

    let moved = Refusal::new(301, "PermanentRedirect").with("Location", "http://127.0.0.1:9/");
    origin.fail_after(2, Outage::Refuse(moved));
    let statuses: Vec<u16> = (0..4).map(|_| get(&origin, "/bucket/k3", &[]).status).collect();
    assert_eq!(statuses, [200, 200, 301, 301]);
    origin.end_outage();
    assert_eq!(get(&origin, "/bucket/k3", &[]).status, 200);
    origin.fail_after(1, Outage::ClosePort);
    assert_eq!(get(&origin, "/bucket/k3", &[]).status, 200);
    assert!(send(&origin, "GET /bucket/k3", &[], "").is_none(), "the connection closes");
    let until = Instant::now() + Duration::from_secs(10);
    while TcpStream::connect(origin.address()).is_ok() {
        assert!(Instant::now() < until, "the port closes");
        std::thread::sleep(Duration::from_millis(5));
    }
    origin.end_outage();
    assert_eq!(get(&origin, "/bucket/k3", &[]).status, 200);
}

#[test]
fn hosts_and_paths_name_the_bucket() {
    let origin = seven(Manners::default());
    let ask = |host, path: &str, header: &str| {
        origin.set_manners(Manners { host, ..Manners::default() });
        get(&origin, path, &[header]).status
    };
    let (in_host, plain) = ("Host: bucket.localhost", "Host: localhost");
    for (host, by_host, by_path) in
        [(HostStyle::Either, 200, 200), (HostStyle::VirtualOnly, 200, 404), (HostStyle::PathOnly, 404, 200)]
    {
        assert_eq!(ask(host, "/k3", in_host), by_host, "{host:?}");
        assert_eq!(ask(host, "/bucket/k3", plain), by_path, "{host:?}");
    }
    assert_eq!(ask(HostStyle::VirtualOnly, "/?list-type=2", in_host), 200);
}

#[test]
fn gcs_has_generations_and_decompresses() {
    let origin = seven(Manners { api: Api::Gcs, ..Manners::default() });
    assert_eq!(origin.uri(), "gs://bucket");
    let create = |body| {
        let condition = "x-goog-if-generation-match: 0";
        send(&origin, "PUT /bucket/new%2Fone", &[condition], body).expect("an answer").status
    };
    assert_eq!((create("one"), create("two")), (200, 412));
    let one = get(&origin, "/bucket/new%2Fone", &[]);
    assert_eq!(one.body, "one");
    assert!(one.header("x-goog-generation").is_some_and(|number| number.parse::<u64>().is_ok()));
    let delete = || send(&origin, "DELETE /bucket/new%2Fone", &[], "").expect("an answer").status;
    assert_eq!((delete(), delete()), (204, 404));
    origin.insert_compressed("log.gz", "\u{1f}gzip", "plain text");
    for (accepts, body, coding) in [
        ("Accept: */*", "plain text", None),
        ("Accept-Encoding: identity", "plain text", None),
        ("Accept-Encoding: gzip;q=1, identity", "\u{1f}gzip", Some("gzip")),
    ] {
        let raw = get(&origin, "/bucket/log.gz", &[accepts, "Range: bytes=0-3"]);
        assert_eq!(raw.header("content-encoding"), coding, "{accepts}");
        let whole = coding.is_none();
        assert_eq!(
            (raw.status, raw.header("content-length").is_none()),
            (if whole { 200 } else { 206 }, whole)
        );
        assert!(raw.body.contains(&body[..4]), "{accepts}: {}", raw.body);
    }
}

#[test]
fn generated_objects_are_listed_and_read_without_storage() {
    let origin =
        OriginEmulator::start(EmulatorConfig::default(), Backing::Generated { keys: 10_000, bytes: 10 });
    let (mut keys, mut after) = (Vec::new(), String::new());
    loop {
        let page = list(&origin, &format!("list-type=2&prefix=set/{after}"));
        keys.extend(page.contents.into_iter().map(|content| content.key));
        let Some(next) = page.next_continuation_token else { break };
        after = format!("&continuation-token={next}");
    }
    assert_eq!((keys.len(), origin.counts().list), (10_000, 10));
    assert!(keys.is_sorted() && keys[0] == "set/000000/000000000", "{}", keys[0]);
    assert_eq!(list(&origin, "list-type=2&prefix=set/000003/").contents.len(), 1000);
    assert_eq!(list(&origin, "list-type=2&prefix=other").contents.len(), 0);
    let bytes = |key: &str| origin.object(key);
    let (first, last) = (bytes(&keys[0]).expect("bytes"), bytes(&keys[9_999]).expect("bytes"));
    assert!(first.len() == 10 && first != last);
    assert_eq!((bytes("set/000000/1"), bytes("set/000010/000010000")), (None, None));
    origin.set_manners(Manners { order: KeyOrder::Shuffled, ..Manners::default() });
    let (mut shuffled, ended) = follow(&origin, 20);
    assert!(ended && !shuffled.is_sorted());
    shuffled.sort();
    assert_eq!(shuffled, keys);
    origin.set_manners(Manners::default());
    // A million keys are a thousand such pages.
    let begun = Instant::now();
    for page in 0..20 {
        list(&origin, &format!("list-type=2&start-after=set/{:06}", page % 10));
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

//! Orders and fetches of views, by a paused clock.

use super::*;
use tokio::time::advance;

fn config(servers: &str) -> ClientConfig {
    ClientConfig::of(servers.parse().expect("addresses"), "cli")
}

fn route(servers: &str) -> Route {
    Route::new(&config(servers)).expect("a route")
}

fn cluster(view: u64, members: &[(&str, &str, u32, bool)]) -> Cluster {
    let members = members.iter().map(|(id, url, weight, up)| fletch_api::Member {
        id: (*id).to_owned(),
        url: (*url).to_owned(),
        weight: *weight,
        zone: None,
        up: *up,
        state: None,
    });
    Cluster { view, domain: Some(Domain::default_domain()), members: members.collect() }
}

const ALL: [(&str, &str, u32, bool); 3] = [
    ("a", "http://127.0.0.1:1", 1, true),
    ("b", "http://127.0.0.1:2", 1, true),
    ("c", "http://127.0.0.1:3", 1, true),
];

/// Puts a view in force, as if an answer had had it.
fn adopt(route: &Route, cluster: &Cluster) {
    route.hear(Some(cluster.view), Instant::now());
    route.adopt(cluster, None, Instant::now());
}

fn chunk(i: u64) -> Subject {
    Subject::Chunk { hash: Hash::of(&i.to_le_bytes()), skip: 0 }
}

fn order(route: &Route, subject: Subject) -> Vec<String> {
    let all = route.candidates(subject, Instant::now());
    all.iter().map(|s| s.shown.rsplit(':').next().unwrap_or_default().to_owned()).collect()
}

/// Returns the ranking of a chunk by the ids, as the servers compute it.
fn ranking(i: u64) -> Vec<String> {
    let placement = Placement::new(ALL.map(|m| Member { id: m.0.to_owned(), weight: 1.0 }));
    let key = StoreKey { domain: Domain::default_domain(), hash: Hash::of(&i.to_le_bytes()) };
    let port = |id: &str| ALL.iter().find(|m| m.0 == id).map(|m| m.1[m.1.len() - 1..].to_owned());
    placement.owners(&key, 3).into_iter().filter_map(|m| port(&m.id)).collect()
}

#[tokio::test(start_paused = true)]
async fn chunks_go_to_their_owners_and_all_else_to_the_first() {
    let route = route("http://127.0.0.1:2,http://127.0.0.1:9");
    assert_eq!(order(&route, chunk(1)), ["2", "9"], "without a view");
    adopt(&route, &cluster(7, &ALL));
    for i in 0..20 {
        let [ranked, given] = [ranking(i), vec!["9".to_owned()]];
        assert_eq!(order(&route, chunk(i)), [ranked.clone(), given].concat(), "chunk {i}");
        let Subject::Chunk { hash, .. } = chunk(i) else { unreachable!() };
        let next = order(&route, Subject::Chunk { hash, skip: 4 });
        assert_eq!(next[..3], [&*ranked[1], &*ranked[2], &*ranked[0]], "after wrong bytes");
    }
    assert_eq!(order(&route, Subject::Any), ["2", "9", "1", "3"]);
    assert_eq!(route.members().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn those_that_rest_or_are_down_come_last() {
    let route = route("http://127.0.0.1:1");
    let mut members = ALL;
    members[1].3 = false;
    adopt(&route, &cluster(7, &members));
    for i in 0..20 {
        let up: Vec<String> = ranking(i).into_iter().filter(|port| port != "2").collect();
        assert_eq!(order(&route, chunk(i)), [up, vec!["2".to_owned()]].concat(), "chunk {i}");
    }
    let first = route.candidates(Subject::Any, Instant::now())[0].clone();
    route.failed(&first, false, Instant::now());
    assert_eq!(order(&route, Subject::Any), ["3", "2", "1"]);
    advance(Duration::from_secs(2)).await;
    assert_eq!(order(&route, Subject::Any), ["1", "3", "2"], "it rested");
    first.answered(None);
    assert_eq!(order(&route, chunk(0)).len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_view_keeps_the_servers_that_it_shares_with_the_last_one() {
    let route = route("http://127.0.0.1:1");
    adopt(&route, &cluster(7, &ALL[..2]));
    let before = route.candidates(Subject::Any, Instant::now());
    route.failed(&before[1], false, Instant::now());
    advance(Duration::from_millis(1500)).await;
    adopt(&route, &cluster(8, &ALL));
    let after = route.candidates(Subject::Any, Instant::now());
    assert!(Arc::ptr_eq(&before[0], &after[0]) && Arc::ptr_eq(&before[1], &after[2]), "{after:?}");
    assert!(after[2].rests(Instant::now()), "what is known of a server stays");
    route.adopt(&cluster(7, &ALL[..1]), None, Instant::now());
    assert_eq!(route.view().expect("a view").number, 8, "an older view");
}

#[tokio::test(start_paused = true)]
async fn a_view_is_fetched_at_most_once_a_second() {
    let route = route("http://127.0.0.1:1");
    let hear = |number| route.hear(Some(number), Instant::now());
    assert!(!hear(VIEW_ALONE) && !hear(0) && !route.hear(None, Instant::now()), "a server that is alone");
    assert!(hear(7), "the first view at once");
    assert!(!hear(7), "another caller has it");
    advance(Duration::from_millis(999)).await;
    assert!(!hear(7));
    advance(Duration::from_millis(502)).await;
    assert!(hear(7), "that fetch failed");
    route.adopt(&cluster(7, &ALL), None, Instant::now());
    advance(Duration::from_secs(60)).await;
    assert!(!hear(7), "nothing is new");
    hear(8);
    advance(Duration::from_secs(1)).await;
    assert!(hear(8) || route.news().due.is_none(), "within a second");
    // 200 answers in a second cost at most one fetch.
    let mut fetches = 0;
    for i in 0..200 {
        fetches += u32::from(hear(9 + i));
        advance(Duration::from_millis(5)).await;
    }
    assert!(fetches <= 1, "{fetches}");
}

#[tokio::test(start_paused = true)]
async fn trouble_and_an_older_cluster_are_looked_at() {
    let route = route("http://127.0.0.1:1");
    let mut members = ALL;
    members[2].3 = false;
    adopt(&route, &cluster(7, &members));
    let hear = |number| route.hear(Some(number), Instant::now());
    assert!(!hear(7));
    advance(Duration::from_secs(4)).await;
    assert!(!hear(7));
    advance(Duration::from_secs(6)).await;
    assert!(hear(7), "a member is down");
    route.adopt(&cluster(7, &ALL), None, Instant::now());
    // etcd was restored from a backup: all servers have a lower number.
    assert!(!hear(5));
    route.adopt(&cluster(5, &ALL), None, Instant::now());
    assert_eq!(route.view().expect("a view").number, 7, "one server that is late");
    advance(Duration::from_secs(29)).await;
    assert!(!hear(5));
    advance(Duration::from_secs(1)).await;
    assert!(hear(5));
    route.adopt(&cluster(5, &ALL), None, Instant::now());
    assert_eq!(route.view().expect("a view").number, 5);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_where_the_user_does_not_expect_it() {
    let members = |route: &Route, url: &'static str| {
        adopt(route, &cluster(7, &[("a", url, 1, true)]));
        route.members().into_iter().map(|m| m.1).collect::<Vec<_>>()
    };
    let none: [&str; 0] = [];
    assert_eq!(members(&route("https://10.0.0.1"), "http://10.0.0.2:7380"), none, "no TLS");
    assert_eq!(members(&route("https://10.0.0.1"), "https://10.0.0.2:7380"), ["https://10.0.0.2:7380"]);
    assert_eq!(members(&route("http://10.0.0.1"), "https://10.0.0.2"), ["https://10.0.0.2"]);
    assert_eq!(members(&route("http://10.0.0.1"), "http://127.0.0.1:22"), none, "the own machine");
    for bad in ["unix:/run/x", "ftp://10.0.0.2", "http://u:p@10.0.0.2", "10.0.0.2:1"] {
        assert_eq!(members(&route("http://10.0.0.1"), bad), none, "{bad}");
    }
    let https = route("https://10.0.0.1");
    adopt(&https, &cluster(7, &[("a", "http://10.0.0.2:7380", 1, true)]));
    let asked = https.candidates(chunk(1), Instant::now());
    assert_eq!(asked.iter().map(|s| &*s.shown).collect::<Vec<_>>(), ["https://10.0.0.1"]);
    assert!(https.at("http://10.0.0.2:7380").is_none() && https.at("https://10.0.0.2").is_some());
    // A server sends a call on (307): to a given server or a member, at the same scheme and port.
    let sent_on = |url: &str| https.member_at(url, "/v1/jobs").map(|server| server.shown.to_string());
    assert_eq!(sent_on("https://10.0.0.1/v1/jobs").as_deref(), Some("https://10.0.0.1"));
    for elsewhere in [
        "http://10.0.0.1/v1/jobs",
        "http://10.0.0.1:443/v1/jobs",
        "https://10.0.0.1:444/v1/jobs",
        "http://10.0.0.2:7380/v1/jobs",
        "https://10.0.0.1@10.0.0.9/v1/jobs",
        "https://10.0.0.1.evil.example/v1/jobs",
        "//10.0.0.1/v1/jobs",
        "/v1/jobs",
        "https://10.0.0.1/v1/jobs?x",
        "unix:/run/x/v1/jobs",
    ] {
        assert_eq!(sent_on(elsewhere), None, "{elsewhere}");
    }
    let unix = route("unix:/run/fletch/server.sock");
    assert!(!unix.hear(Some(7), Instant::now()), "the server of a socket knows the user");
}

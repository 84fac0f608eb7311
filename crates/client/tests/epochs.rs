//! Tests the epoch client against a failing server: which leases it holds, renews and hands out.

use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::{BufMut, BytesMut};
use fletch_api::{
    Acked, Acks, Code, GrantStatus, Job, LeaseGrant, LeaseRequest, OrderKind, Problem, SampleHead,
    Visitation, WorldSpec,
    epochs::ACKS_MAX,
    frames::{FrameHeader, FrameKind, PREFACE, WHOLE},
    routes,
};
use fletch_client::{
    Client, ClientConfig, ClientError, Endpoint,
    epochs::{JobHandle, LEASES_AHEAD_MAX, Next},
};
use fletch_core::{Hash, Kind, LayoutId, Root, plan::Tail};
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// The behaviour of a lease stream. The server uses each in turn, and repeats the last.
#[derive(Clone, Copy)]
enum Stream {
    /// Lease `.0` with two entries. After the first `.1` of them, the stream sends a retryable problem.
    Short(u64, u32),
    /// Lease `.0`, then a problem that is not retryable.
    Never(u64),
    /// Lease `.0`, complete.
    Whole(u64),
    /// Lease `.0`, complete. The first sample has another length than its head says.
    Damaged(u64),
    /// Lease `.0`, complete, after longer than [`PATIENCE`].
    Late(u64),
    /// Lease `.0`, complete, with the entries 2 and 3.
    Others(u64),
    /// Lease `.0` with all its samples, then a retryable problem in place of the end.
    Endless(u64),
    /// No lease: the rank must acknowledge first.
    Full,
}

/// The patience of a reader that is to give up.
const PATIENCE: Duration = Duration::from_secs(4);

#[derive(Default)]
struct Seen {
    streams: Mutex<Vec<Stream>>,
    asked: Mutex<Vec<LeaseRequest>>,
    renewed: Mutex<BTreeSet<(u64, u64)>>,
    /// The requests that released leases, by epoch.
    released: Mutex<Vec<(u64, Acks)>>,
    longest: AtomicU64,
    closed: AtomicBool,
    deleted: AtomicBool,
}

type Served = State<Arc<Seen>>;

fn problem(code: Code) -> Response {
    let p = Problem::new(code, "what happened", "what to do");
    (StatusCode::from_u16(p.status).expect("status"), Json(p)).into_response()
}

fn job() -> Job {
    Job {
        id: "0123".to_owned(),
        name: "train-7".parse().expect("name"),
        dataset: "d".parse().expect("name"),
        root: Root(Hash::of(b"root")),
        layout: LayoutId(Hash::of(b"layout")),
        seed: 1,
        order: OrderKind::Strict,
        visitation: Visitation::ExactlyOnce,
        world: WorldSpec { ranks: 1, batch: 2, tail: Tail::Keep },
        plan: Hash::of(b"plan"),
        samples: 2,
        entries: 2,
        steps: 1,
        epochs: Vec::new(),
        sweep: None,
        benefit: None,
        doing: None,
        settings: Default::default(),
        share: None,
        loaders: None,
        waits: Vec::new(),
        is_away: false,
    }
}

async fn job_now(State(seen): Served) -> Response {
    if seen.deleted.load(Relaxed) { problem(Code::NotFound) } else { Json(job()).into_response() }
}

/// Answers acks: epoch 0 is unknown, epoch 1 can be closed, every other epoch is open.
async fn acks(State(seen): Served, Path((_, epoch)): Path<(String, u64)>, Json(ask): Json<Acks>) -> Response {
    seen.longest.fetch_max(ask.renew.len() as u64, Relaxed);
    if !ask.release.is_empty() {
        seen.released.lock().push((epoch, ask.clone()));
    }
    if seen.deleted.load(Relaxed) || epoch == 0 {
        return problem(Code::NotFound);
    }
    if epoch == 1 && seen.closed.load(Relaxed) {
        return problem(Code::EpochClosed);
    }
    seen.renewed.lock().extend(ask.renew.iter().map(|&l| (epoch, l)));
    Json(Acked { ttl_ms: 300, ..Acked::default() }).into_response()
}

async fn leases(State(seen): Served, Json(ask): Json<LeaseRequest>) -> Response {
    let from = ask.from;
    seen.asked.lock().push(ask);
    let stream = {
        let mut streams = seen.streams.lock();
        if streams.len() > 1 { streams.remove(0) } else { streams[0] }
    };
    let mut out = BytesMut::new();
    out.extend_from_slice(&PREFACE);
    let frame = |out: &mut BytesMut, kind: FrameKind, status: u16, index: u32, b: &[u8]| {
        out.extend_from_slice(&FrameHeader::new(kind, status, index, b.len() as u64).encode());
        out.put_slice(b);
    };
    let (lease, whole) = match stream {
        Stream::Short(lease, n) => (lease, n),
        Stream::Never(lease) => (lease, 0),
        Stream::Whole(lease)
        | Stream::Damaged(lease)
        | Stream::Late(lease)
        | Stream::Others(lease)
        | Stream::Endless(lease) => (lease, 2),
        Stream::Full => (0, 2),
    };
    let first = if matches!(stream, Stream::Others(_)) { 2 } else { 0 };
    let is_full = matches!(stream, Stream::Full);
    if matches!(stream, Stream::Late(_)) {
        tokio::time::sleep(PATIENCE).await;
    }
    let grant = LeaseGrant {
        status: if is_full { GrantStatus::Full } else { GrantStatus::Granted },
        lease,
        again: false,
        entries: if is_full { Vec::new() } else { vec![first, first + 1] },
        from,
        ttl_ms: 300,
        left: 0,
    };
    frame(&mut out, FrameKind::Grant, WHOLE, 0, &serde_json::to_vec(&grant).expect("json"));
    for entry in if is_full { 0..0 } else { from..whole } {
        let sample = first + entry;
        let head = SampleHead {
            entry: sample,
            sample,
            ordinal: sample.into(),
            copy: 0,
            files: Vec::new(),
            shared: 0,
        };
        frame(&mut out, FrameKind::Sample, WHOLE, entry, &serde_json::to_vec(&head).expect("json"));
        let bytes: &[u8] = if matches!(stream, Stream::Damaged(_)) { b"damaged" } else { b"" };
        frame(&mut out, FrameKind::Data, WHOLE, entry, bytes);
    }
    if whole < 2 || matches!(stream, Stream::Endless(_)) {
        let code =
            if matches!(stream, Stream::Never(_)) { Code::OriginCorrupt } else { Code::OriginUnavailable };
        let p = Problem::new(code, "not now", "");
        frame(&mut out, FrameKind::Error, p.status, whole, &serde_json::to_vec(&p).expect("json"));
    } else {
        frame(&mut out, FrameKind::End, WHOLE, 2 - from, b"");
    }
    out.freeze().into_response()
}

async fn serve(streams: &[Stream]) -> (JobHandle, Arc<Seen>) {
    let seen = Arc::new(Seen { streams: Mutex::new(streams.to_vec()), ..Seen::default() });
    let app = Router::new()
        .route(routes::JOB, get(job_now))
        .route("/v1/jobs/{id}/epochs/{epoch}/acks", post(acks))
        .route("/v1/jobs/{id}/epochs/{epoch}/leases", post(leases))
        .with_state(Arc::clone(&seen));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let endpoint: Endpoint = format!("http://{}", listener.local_addr().expect("addr")).parse().expect("url");
    TaskTracker::new().spawn(async move { axum::serve(listener, app).await });
    let config =
        ClientConfig { io_timeout: Duration::from_secs(30), ..ClientConfig::new(endpoint, "loader") };
    let client = Client::new(config).expect("client");
    (client.job("0123").await.expect("the job"), seen)
}

async fn until(what: impl Fn() -> bool) {
    let wait = async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("in time");
}

/// A lease that is not handed out must not be renewed: the server could never grant its entries again.
#[tokio::test]
async fn a_lease_that_was_not_handed_out_is_not_held() {
    let (job, _) = serve(&[Stream::Never(3)]).await;
    job.reader(2, 0, 0).next(2).await.expect_err("a fatal problem");
    assert!(job.held().is_empty());
    let (job, seen) = serve(&[Stream::Short(3, 1)]).await;
    job.reader(2, 0, 0).patience(Duration::from_millis(400)).next(2).await.expect_err("out of patience");
    assert!(job.held().is_empty());
    assert!(seen.asked.lock().len() > 1, "the request was retried");
    let mut reader = job.reader(2, 0, 0).patience(Duration::from_secs(60));
    tokio::select! {
        got = reader.next(2) => panic!("{got:?}"),
        () = until(|| job.held().len() == 1) => {}
    }
    assert!(job.held().is_empty(), "no caller waits for the lease any more");
    let (job, _) = serve(&[Stream::Short(3, 1), Stream::Whole(3)]).await;
    let Next::Batch(b) = job.reader(2, 0, 0).next(2).await.expect("a batch") else { panic!("a batch") };
    assert_eq!((b.samples.len(), b.token.lease, job.held().len()), (2, 3, 1));
}

/// A prefetching reader receives the next lease while the last one is consumed. Dropping the reader releases
/// it.
#[tokio::test]
async fn the_next_lease_is_prefetched() {
    let leases = [3, 4].map(Stream::Whole);
    let later = [5, 5, 6, 7, 8].map(Stream::Whole);
    let (job, seen) = serve(&[&leases[..], &[Stream::Short(5, 1)], &later].concat()).await;
    let asked = || seen.asked.lock().iter().map(|a| (a.sequence, a.from)).collect::<Vec<_>>();
    let mut reader = job.reader(2, 0, 0).after_sequence(10).prefetch(1);
    let Next::Batch(b) = reader.next(2).await.expect("a batch") else { panic!("a batch") };
    assert_eq!((b.token.lease, reader.sequence()), (3, 11));
    until(|| job.held().len() == 2 && asked().len() == 2).await;
    let Next::Batch(b) = reader.next(2).await.expect("a batch") else { panic!("a batch") };
    assert_eq!((b.token.lease, reader.sequence()), (4, 12));
    // A broken stream is retried, also during a prefetch.
    until(|| asked().len() == 4).await;
    assert_eq!(asked(), [(11, 0), (12, 0), (13, 0), (13, 1)]);
    assert_eq!(job.held().len(), 3);
    // A reader that continues after another one uses the sequence number of the prefetched lease.
    let last = reader.sequence();
    drop(reader);
    let mut reader = job.reader(2, 0, 0).after_sequence(last).prefetch(1);
    until(|| job.held().len() == 2).await;
    let Next::Batch(b) = reader.next(2).await.expect("a batch") else { panic!("a batch") };
    assert_eq!((b.token.lease, b.samples.len(), asked()[4]), (5, 2, (13, 0)));
    // A prefetched lease that a renewal reported gone is not handed out.
    until(|| job.held().len() == 4).await;
    job.held().release(2, 0, 6);
    let Next::Batch(b) = reader.next(2).await.expect("a batch") else { panic!("a batch") };
    assert_eq!((b.token.lease, reader.sequence()), (7, 14));
    until(|| job.held().len() == 5).await;
    assert_eq!(asked()[5..], [(14, 0), (14, 0), (15, 0)]);
    drop(reader);
    until(|| job.held().len() == 4).await;
}

fn lease_of(next: Next) -> u64 {
    let Next::Batch(b) = next else { panic!("{next:?}") };
    b.token.lease
}

/// A reader with several leases ahead hands them out in order. It asks again for one that is gone or failed,
/// with its number, while it keeps the later ones.
#[tokio::test]
async fn several_leases_are_ahead_of_the_caller() {
    let leases: Vec<Stream> = (1..=5).map(Stream::Whole).chain([8, 6, 7, 9].map(Stream::Whole)).collect();
    let (job, seen) = serve(&leases).await;
    let asked = || seen.asked.lock().iter().map(|a| a.sequence).collect::<Vec<_>>();
    let mut reader = job.reader(2, 0, 0).after_sequence(10).prefetch(3);
    assert_eq!((lease_of(reader.next(2).await.expect("a batch")), reader.sequence()), (1, 11));
    until(|| job.held().len() == 4).await;
    assert_eq!(asked(), [11, 12, 13, 14]);
    assert_eq!((lease_of(reader.next(2).await.expect("a batch")), reader.sequence()), (2, 12));
    until(|| job.held().len() == 5).await;
    // The next lease is gone: its number gets another one, and the leases after it stay.
    job.held().release(2, 0, 3);
    assert_eq!((lease_of(reader.next(2).await.expect("a batch")), reader.sequence()), (8, 13));
    until(|| job.held().len() == 6).await;
    assert_eq!(asked(), [11, 12, 13, 14, 15, 13, 16]);
    for (lease, sequence) in [(4, 14), (5, 15), (6, 16)] {
        assert_eq!((lease_of(reader.next(2).await.expect("a batch")), reader.sequence()), (lease, sequence));
    }
    drop(reader);
    until(|| job.held().len() == 6).await;
    // More than the server remembers are not asked for.
    let (job, seen) = serve(&(1..=20).map(Stream::Whole).collect::<Vec<_>>()).await;
    let mut reader = job.reader(2, 0, 0).prefetch(usize::MAX);
    reader.next(2).await.expect("a batch");
    until(|| job.held().len() == 1 + LEASES_AHEAD_MAX).await;
    assert_eq!(seen.asked.lock().len(), 1 + LEASES_AHEAD_MAX);
}

/// After an answer without a lease the reader asks for nothing ahead until its caller wants a lease.
#[tokio::test]
async fn an_answer_without_a_lease_ends_the_requests_ahead() {
    let whole = |leases: &[u64]| leases.iter().copied().map(Stream::Whole).collect::<Vec<_>>();
    let (job, seen) = serve(&[whole(&[1, 2]), vec![Stream::Full], whole(&[3, 4, 5, 6])].concat()).await;
    let asked = || seen.asked.lock().iter().map(|a| a.sequence).collect::<Vec<_>>();
    let mut reader = job.reader(2, 0, 0).after_sequence(10).prefetch(3);
    assert_eq!(lease_of(reader.next(2).await.expect("a batch")), 1);
    until(|| asked().len() == 3).await;
    assert_eq!(lease_of(reader.next(2).await.expect("a batch")), 2);
    assert_eq!(asked(), [11, 12, 13], "the one after the full answer was not sent");
    assert_eq!((lease_of(reader.next(2).await.expect("a batch")), reader.sequence()), (3, 14));
    until(|| asked().len() == 7).await;
    assert_eq!(asked(), [11, 12, 13, 14, 15, 16, 17]);
    // With nothing ahead, a full answer is the caller's.
    let (job, _) = serve(&[Stream::Full]).await;
    let full = job.reader(2, 0, 0).prefetch(3).next(2).await.expect("an answer");
    assert!(matches!(full, Next::Full), "{full:?}");
}

/// I2: a lease whose stream has no end was not granted durably, and nobody gets it.
#[tokio::test]
async fn a_lease_without_an_end_is_not_handed_out() {
    for leases_ahead in [0, 1] {
        let streams = [Stream::Whole(1), Stream::Endless(2), Stream::Others(2), Stream::Others(2)];
        let (job, seen) = serve(&[&streams[..], &[3, 4, 5].map(Stream::Whole)].concat()).await;
        let mut reader = job.reader(2, 0, 0).after_sequence(10).prefetch(leases_ahead);
        assert_eq!(lease_of(reader.next(2).await.expect("a batch")), 1);
        let Next::Batch(b) = reader.next(2).await.expect("a batch") else { panic!("a batch") };
        // The number of a lost grant came again, for other entries.
        let entries: Vec<u32> = b.samples.iter().map(|s| s.entry).collect();
        assert_eq!((b.token.lease, entries), (2, vec![2, 3]));
        let asked: Vec<_> = seen.asked.lock().iter().map(|a| (a.sequence, a.from)).collect();
        assert_eq!(asked[..4], [(11, 0), (12, 0), (12, 2), (12, 0)]);
    }
}

/// A failed prefetch is repeated with the same sequence number when its lease is wanted. Then its error is
/// returned.
#[tokio::test]
async fn a_failed_prefetch_is_reported_when_its_lease_is_wanted() {
    let (job, seen) = serve(&[Stream::Whole(3), Stream::Never(4), Stream::Whole(4)]).await;
    let mut reader = job.reader(2, 0, 0).after_sequence(10).prefetch(1);
    let Next::Batch(_) = reader.next(2).await.expect("a batch") else { panic!("a batch") };
    until(|| seen.asked.lock().len() == 2 && job.held().len() == 1).await;
    let Next::Batch(b) = reader.next(2).await.expect("a batch") else { panic!("a batch") };
    assert_eq!((b.token.lease, seen.asked.lock()[2].sequence), (4, 12));
    let (job, seen) = serve(&[Stream::Whole(3), Stream::Never(4)]).await;
    let mut reader = job.reader(2, 0, 0).prefetch(1);
    let Next::Batch(_) = reader.next(2).await.expect("a batch") else { panic!("a batch") };
    until(|| seen.asked.lock().len() == 2).await;
    reader.next(2).await.expect_err("it failed again");
}

/// A new lease replaces one that was partly received. The samples of the old lease are discarded.
#[tokio::test]
async fn a_new_lease_replaces_a_partly_received_one() {
    let entries =
        |b: &fletch_client::epochs::LeaseBatch| b.samples.iter().map(|s| s.entry).collect::<Vec<_>>();
    let (job, seen) = serve(&[Stream::Short(3, 0), Stream::Whole(4)]).await;
    let Next::Batch(b) = job.reader(2, 0, 0).next(2).await.expect("a batch") else { panic!("a batch") };
    assert_eq!((b.token.lease, entries(&b), job.held().len()), (4, vec![0, 1], 1));
    assert_eq!(seen.asked.lock().len(), 2, "the new lease is received at once");
    let (job, seen) = serve(&[Stream::Short(3, 1), Stream::Whole(4)]).await;
    let Next::Batch(b) = job.reader(2, 0, 0).next(2).await.expect("a batch") else { panic!("a batch") };
    assert_eq!((b.token.lease, entries(&b), job.held().len()), (4, vec![0, 1], 1));
    let from: Vec<u32> = seen.asked.lock().iter().map(|a| a.from).collect();
    assert_eq!(from, [0, 1, 0]);
}

/// Damaged samples are damage, not a silent server. The reader asks again until its patience ends.
#[tokio::test]
async fn a_damaged_sample_is_refused_and_asked_for_again() {
    let (job, seen) = serve(&[Stream::Damaged(3), Stream::Whole(3)]).await;
    let Next::Batch(b) = job.reader(2, 0, 0).next(2).await.expect("a batch") else { panic!("a batch") };
    assert!(b.samples.iter().all(|s| s.bytes.is_empty()));
    assert_eq!(seen.asked.lock().len(), 2);
    let (job, _) = serve(&[Stream::Damaged(3)]).await;
    let error = job.reader(2, 0, 0).patience(Duration::ZERO).next(2).await.expect_err("damaged");
    assert!(matches!(error, ClientError::CorruptSample { entry: 0, .. }), "{error:?}");
    assert_eq!((error.kind(), error.is_unreachable()), (Kind::Corrupt, false));
    let text = error.to_string();
    assert!(text.contains("wrong bytes") && !text.contains("does not answer"), "{text}");
}

/// An expired lease is reported as such.
#[tokio::test]
async fn a_lease_that_expires_while_it_is_received_is_named() {
    let (job, _) = serve(&[Stream::Short(3, 1), Stream::Late(4)]).await;
    let error = job.reader(2, 0, 0).patience(PATIENCE).next(2).await.expect_err("expired");
    assert!(matches!(error, ClientError::LeaseExpired { .. }), "{error:?}");
    assert_eq!((error.kind(), error.is_unreachable()), (Kind::Unavailable, false));
    let text = error.to_string();
    assert!(text.contains("expired") && !text.contains("does not answer"), "{text}");
}

/// Releases travel alone, because an earlier server rejects a request with a field that it does not know. A
/// release that is rejected is given up, and renewals go on.
#[tokio::test]
async fn releases_travel_alone_and_are_given_up_if_rejected() {
    let (job, seen) = serve(&[Stream::Whole(1)]).await;
    let _beat = AbortOnDropHandle::new(TaskTracker::new().spawn({
        let job = job.clone();
        async move { drop(job.keep_alive().await) }
    }));
    for (epoch, lease) in [(0, 7), (2, 8), (2, 9), (2, 10)] {
        job.held().hold(epoch, 0, lease, 300);
    }
    job.held().forget(2, 0, 8);
    for (epoch, lease) in [(0, 7), (2, 9)] {
        job.held().release(epoch, 0, lease);
    }
    tokio::time::timeout(PATIENCE, job.held().settled()).await.expect("also the rejected one");
    let alone = |release| Acks { rank: 0, release: vec![release], ..Acks::default() };
    let released: Vec<(u64, Acks)> = seen.released.lock().clone();
    assert!(released.iter().all(|(_, acks)| acks.loader.is_some()), "{released:?}");
    let released = released.into_iter().map(|(epoch, acks)| (epoch, Acks { loader: None, ..acks }));
    assert_eq!(released.collect::<Vec<_>>(), [(0, alone(7)), (2, alone(9))]);
    assert_eq!(job.held().len(), 1);
    until(|| seen.renewed.lock().contains(&(2, 10))).await;
}

/// A gone epoch releases its leases and nothing else. Many leases need several requests. The first is in
/// time.
#[tokio::test]
async fn renewals_go_on_for_live_epochs() {
    let (job, seen) = serve(&[Stream::Whole(1)]).await;
    let beat = TaskTracker::new().spawn({
        let job = job.clone();
        async move { job.keep_alive().await }
    });
    job.held().hold(0, 0, 7, 300);
    job.held().hold(1, 0, 8, 300);
    let many = 2 * ACKS_MAX as u64 + 1;
    (1..=many).for_each(|lease| job.held().hold(2, 0, lease, 300));
    let renewed = |epoch| seen.renewed.lock().iter().filter(|r| r.0 == epoch).count() as u64;
    until(|| renewed(1) == 1 && renewed(2) == many && job.held().len() as u64 == many + 1).await;
    assert_eq!(seen.longest.load(Relaxed), ACKS_MAX as u64);
    seen.closed.store(true, Relaxed);
    until(|| job.held().len() as u64 == many).await;
    seen.renewed.lock().clear();
    until(|| renewed(2) == many).await;
    assert!(!beat.is_finished());
    seen.deleted.store(true, Relaxed);
    let end = tokio::time::timeout(Duration::from_secs(20), beat).await.expect("it ends").expect("a task");
    assert_eq!(end.code(), Some(Code::NotFound));
}

//! A server of a cluster that answers for a job late, or by an old term: the client asks again.

use axum::{
    Json, Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::{BufMut, BytesMut};
use fletch_api::{
    Acked, GrantStatus, Job, LeaseGrant, LeaseRequest, OrderKind, SampleHead, Visitation, WorldSpec,
    frames::{FrameHeader, FrameKind, PREFACE, WHOLE},
    headers, routes,
};
use fletch_client::{
    Client, ClientConfig, Endpoint,
    epochs::{JobHandle, Next},
};
use fletch_core::{Hash, LayoutId, Root, plan::Tail};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tokio_util::task::TaskTracker;

/// The term that an answer names, and how long the server waits before it answers, or before its stream ends.
type Answer = (&'static str, u64);

#[derive(Default)]
struct Seen {
    answers: Mutex<Vec<Answer>>,
    asked: Mutex<Vec<LeaseRequest>>,
}

impl Seen {
    /// Returns the next answer. The last one repeats.
    fn next(&self) -> Answer {
        let mut answers = self.answers.lock();
        if answers.len() > 1 { answers.remove(0) } else { answers[0] }
    }
}

async fn job() -> Json<Job> {
    Json(Job {
        id: "0123".to_owned(),
        name: "train-7".parse().expect("name"),
        dataset: "d".parse().expect("name"),
        root: Root(Hash::of(b"root")),
        layout: LayoutId(Hash::of(b"layout")),
        seed: 1,
        order: OrderKind::Strict,
        visitation: Visitation::ExactlyOnce,
        world: WorldSpec { ranks: 1, batch: 1, tail: Tail::Keep },
        plan: Hash::of(b"plan"),
        samples: 1,
        entries: 1,
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
    })
}

fn named(term: &str, answer: impl IntoResponse) -> Response {
    let mut response = answer.into_response();
    if !term.is_empty() {
        response.headers_mut().insert(headers::TERM, term.parse().expect("a header"));
    }
    response
}

async fn acks(State(seen): State<Arc<Seen>>) -> Response {
    let (term, wait_ms) = seen.next();
    seen.asked.lock().push(LeaseRequest::default());
    tokio::time::sleep(Duration::from_millis(wait_ms)).await;
    named(term, Json(Acked { ttl_ms: 300, ..Acked::default() }))
}

async fn leases(State(seen): State<Arc<Seen>>, Json(ask): Json<LeaseRequest>) -> Response {
    let (term, wait_ms) = seen.next();
    let from = ask.from;
    seen.asked.lock().push(ask);
    let mut out = BytesMut::new();
    out.extend_from_slice(&PREFACE);
    let mut frame = |kind, index, bytes: &[u8]| {
        out.extend_from_slice(&FrameHeader::new(kind, WHOLE, index, bytes.len() as u64).encode());
        out.put_slice(bytes);
    };
    let (status, entries) = (GrantStatus::Granted, vec![0]);
    let grant = LeaseGrant { status, lease: 7, again: from > 0, entries, from, ttl_ms: 300, left: 0 };
    frame(FrameKind::Grant, 0, &serde_json::to_vec(&grant).expect("JSON"));
    if from == 0 {
        let head = SampleHead { entry: 0, sample: 0, ordinal: 0, copy: 0, files: Vec::new(), shared: 0 };
        frame(FrameKind::Sample, 0, &serde_json::to_vec(&head).expect("JSON"));
        frame(FrameKind::Data, 0, b"");
    }
    frame(FrameKind::End, 1 - from, b"");
    tokio::time::sleep(Duration::from_millis(wait_ms)).await;
    named(term, out.freeze())
}

async fn serve(answers: &[Answer]) -> (JobHandle, Arc<Seen>) {
    let seen = Arc::new(Seen { answers: Mutex::new(answers.to_vec()), ..Seen::default() });
    let app = Router::new()
        .route(routes::JOB, get(job))
        .route("/v1/jobs/{id}/epochs/{epoch}/acks", post(acks))
        .route("/v1/jobs/{id}/epochs/{epoch}/leases", post(leases))
        .with_state(Arc::clone(&seen));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let endpoint: Endpoint = format!("http://{}", listener.local_addr().expect("addr")).parse().expect("url");
    TaskTracker::new().spawn(async move { axum::serve(listener, app).await });
    let config =
        ClientConfig { io_timeout: Duration::from_secs(20), ..ClientConfig::new(endpoint, "loader") };
    let client = Client::new(config).expect("client");
    (client.job("0123").await.expect("the job"), seen)
}

#[tokio::test]
async fn an_ack_that_comes_late_or_by_a_lower_term_is_sent_again() {
    for (answers, requests, why) in [
        (&[("job-1 3 5000", 0)][..], 1, "in time"),
        (&[("", 300), ("job-1 3 5000", 0)], 1, "a server that is alone names no term"),
        (&[("job-1 3 100", 300), ("job-1 3 5000", 0)], 2, "late"),
        (&[("a newer form", 0)], 1, "the client does not understand it"),
    ] {
        let (job, seen) = serve(answers).await;
        job.ack(0, 0, &[]).await.expect(why);
        assert_eq!(seen.asked.lock().len(), requests, "{why}");
    }
    let (job, seen) = serve(&[("job-1 3 5000", 0), ("job-1 2 5000", 0), ("job-1 4 5000", 0)]).await;
    job.ack(0, 0, &[]).await.expect("the term 3");
    job.clone().ack(0, 0, &[]).await.expect("the term 4");
    assert_eq!(seen.asked.lock().len(), 3, "the term 2 does not count, also for a clone of the handle");
    let (job, _) = serve(&[("job-1 3 5000", 0), ("job-1 2 5000", 0)]).await;
    job.ack(0, 0, &[]).await.expect("the term 3");
    let never = tokio::time::timeout(Duration::from_secs(1), job.ack(0, 0, &[])).await;
    assert!(never.is_err(), "an old primary confirms nothing: {never:?}");
}

#[tokio::test]
async fn a_lease_that_ends_late_is_confirmed_without_its_samples() {
    let (job, seen) = serve(&[("job-1 3 100", 300), ("job-1 3 5000", 0)]).await;
    let next = job.reader(0, 0, 0).next(1).await.expect("a lease");
    assert!(matches!(&next, Next::Batch(batch) if batch.samples.len() == 1), "{next:?}");
    let asked: Vec<(u64, u32)> = seen.asked.lock().iter().map(|a| (a.sequence, a.from)).collect();
    assert!(asked.len() == 2 && asked[0].0 == asked[1].0, "{asked:?}");
    assert_eq!(asked.iter().map(|a| a.1).collect::<Vec<_>>(), [0, 1], "no sample comes twice");
}

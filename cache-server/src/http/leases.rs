//! `POST …/leases`: the next samples of an epoch, granted durably and then streamed.

use super::{
    batch::{Content, Item, What, frames_of, header, together},
    body::{Broken, Charge, Piece, of_stream},
    chunks::finish,
    entry::{Span, spans},
    epochs::{TwoPaths, job_of},
    files::{content, piece, read_all, read_now},
    json,
    problem::{Answer, Fault},
};
use crate::{
    accounting::{Component, Cost, Tally},
    auth::Principal,
    epochs::{Delivery, Epoch, Granted},
    jobs::OpenJob,
    read_ahead::{AHEAD_BYTES_MAX, Room},
    server::Server,
    sweep::DeliveryClass,
};
use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, Response, StatusCode, header as names},
};
use bytes::Bytes;
use fletch_api::{
    Code, GrantStatus, LeaseGrant, LeaseRequest, Problem, SampleFile, SampleHead, SampleRef,
    epochs::WAIT_MS_MAX,
    frames::{FrameKind, PREFACE, WHOLE},
    headers,
};
use fletch_core::{delivery::Request, plan::Item as PlanItem};
use fletch_store::ReaderKind;
use fletch_tables::Found;
use futures::{Stream, StreamExt as _, stream, stream::BoxStream};
use serde::Serialize;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// A stream that has nothing to say for so long gives a sign of life; sooner where leases are short.
const HEARTBEAT: Duration = Duration::from_secs(3);
/// Samples of a stream that are read at once, at most.
const AHEAD_MAX: usize = 64;
/// A lease whose stream is read is renewed so often.
const TOUCH: Duration = Duration::from_secs(1);

/// The next samples for a rank's worker, in one stream.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/epochs/{epoch}/leases", tag = "jobs", request_body = LeaseRequest,
    params(("id" = String, Path, description = "The job"), ("epoch" = u64, Path, description = "Which epoch; it begins with its first request")),
    responses(
        (status = 200, description = "A stream of frames: the grant, then of each entry what it is and its bytes", content_type = "application/vnd.fletch.frames"),
        (status = 400, description = "No such rank or number of entries, or an ack that does not fit", body = Problem, content_type = "application/problem+json"),
        (status = 404, description = "No such job", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "A sequence number that is behind, another rank's lease, a closed epoch, a full ledger", body = Problem, content_type = "application/problem+json"),
        (status = 410, description = "A lease to be acknowledged is gone", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "At a limit", body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn post(
    State(server): State<Arc<Server>>,
    who: Principal,
    path: TwoPaths,
    request: HeaderMap,
    body: Body,
) -> Answer {
    let ask: LeaseRequest = json(&server, body).await?;
    let full = || {
        let detail = format!("{} requests for bytes are under way", server.limits.requests);
        Fault::new(Code::Overloaded, detail, "wait and ask again, or raise limits.requests")
    };
    if server.turns.available_permits() == 0 {
        return Err(full());
    }
    let (job, number) = job_of(&server, &who, path).await?;
    let epoch = job.epoch_for_lease(number, &ask).await?;
    let wait = Duration::from_millis(ask.wait_ms.min(WAIT_MS_MAX)).min(server.limits.io_timeout / 2);
    let granted = epoch.lease(&ask, Instant::now() + wait).await?;
    // Whoever waits for an ack keeps nobody from bytes; one who is refused here asks again for the same lease.
    let permit = Arc::clone(&server.turns).try_acquire_owned().map_err(|_| full())?;
    let word = request.get(headers::COMPONENT).and_then(|w| w.to_str().ok()).unwrap_or("loader");
    let reader = Reader::new(&server, &who, &job, &epoch, Component::from_word(word))?;
    let pieces = stream_of(reader, &epoch, &ask, granted);
    let body = of_stream(&server, together(pieces), None, Some(permit));
    let head = Response::builder()
        .status(StatusCode::OK)
        .header(names::CONTENT_TYPE, headers::FRAMES)
        .header(names::CACHE_CONTROL, "no-store");
    finish(head, body)
}

fn json_frame(kind: FrameKind, index: u32, what: &impl Serialize) -> [Piece; 2] {
    // Plain fields of text and numbers always serialize.
    let text = serde_json::to_vec(what).unwrap_or_default();
    [header(kind, WHOLE, index, text.len() as u64), Piece::Framing(text.into())]
}

fn stream_of(
    reader: Reader,
    epoch: &Epoch,
    ask: &LeaseRequest,
    granted: Granted,
) -> BoxStream<'static, Result<Piece, Broken>> {
    let Granted { status, lease, again, entries, left } = granted;
    let from = (ask.from as usize).min(entries.len());
    let grant = LeaseGrant {
        status,
        lease,
        again,
        entries: entries.iter().map(|e| e.0).collect(),
        from: u32::try_from(from).unwrap_or(u32::MAX),
        ttl_ms: epoch.ttl_ms(),
        left,
    };
    let begin = [Piece::Framing(Bytes::from_static(&PREFACE))];
    let begin = begin.into_iter().chain(json_frame(FrameKind::Grant, 0, &grant)).map(Ok::<_, Broken>);
    let count = u32::try_from(entries.len() - from).unwrap_or(u32::MAX);
    let end = [Ok(header(FrameKind::End, WHOLE, count, 0))];
    if status != GrantStatus::Granted {
        return stream::iter(begin.chain(end).collect::<Vec<_>>()).boxed();
    }
    let refs = ask.refs;
    let life = Life::new(&reader.job, epoch.number(), ask, lease);
    let todo = (0u32..).zip(entries).skip(from);
    let room = Arc::new(Room::new(&reader.server.read_ahead));
    let (finder, first) = (reader.clone(), grant.from);
    let items = stream::iter(todo)
        .map(move |(index, (entry, item, class))| {
            let finder = finder.clone();
            async move { (index, entry, item, class, finder.files(item.sample).await) }
        })
        .buffered(AHEAD_MAX)
        // One after the other, so that the next to be sent has room before later ones.
        .then(move |(index, entry, item, class, files)| {
            let room = Arc::clone(&room);
            async move {
                let bytes = files.as_ref().map_or(0, |f| if refs { 0 } else { bytes_of(f) });
                (index, entry, item, class, files, room.take(index - first, bytes).await)
            }
        })
        .map(move |(index, entry, item, class, files, held)| {
            let reader = reader.clone();
            async move {
                let now = reader.delivery.class_now(item, class);
                let (head, what) = reader.sample(index, entry, item, now, files, refs).await;
                reader.delivery.was_read(item, class);
                (head, what.map(|what| Item { index, name: String::new(), what, held }))
            }
        })
        .buffered(AHEAD_MAX)
        .flat_map(|(head, item)| {
            let rest = item.map(|i| frames_of(i).boxed()).unwrap_or_else(|| stream::empty().boxed());
            stream::iter(head.into_iter().map(Ok)).chain(rest)
        });
    stream::iter(begin.collect::<Vec<_>>()).chain(alive(items.boxed(), life)).chain(stream::iter(end)).boxed()
}

/// With signs of life between items that take long. Inside an item nothing is awaited between a frame's
/// header and its bytes, so none comes there. While somebody takes what is sent, either of them, the lease lives.
fn alive(
    items: BoxStream<'static, Result<Piece, Broken>>,
    life: Life,
) -> impl Stream<Item = Result<Piece, Broken>> + Send + 'static {
    stream::unfold((items, life), |(mut items, mut life)| async move {
        life.touch();
        match tokio::time::timeout(HEARTBEAT.min(life.often * 4), items.next()).await {
            Ok(next) => next.map(|piece| (piece, (items, life))),
            Err(_) => Some((Ok(header(FrameKind::Heartbeat, WHOLE, 0, 0)), (items, life))),
        }
    })
}

/// Keeps a lease alive while its stream is read.
struct Life {
    job: Arc<OpenJob>,
    epoch: u64,
    lease: u64,
    request: Request,
    often: Duration,
    last: Option<Instant>,
}

impl Life {
    fn new(job: &Arc<OpenJob>, epoch: u64, ask: &LeaseRequest, lease: u64) -> Self {
        let request = Request { rank: ask.rank, worker: ask.worker, sequence: ask.sequence };
        let often = (job.setup.context.lease_ttl / 8).clamp(Duration::from_millis(25), TOUCH);
        Life { job: Arc::clone(job), epoch, lease, request, often, last: None }
    }

    /// Not for every piece: it takes the epoch's lock. Through the job, which may have read the epoch anew.
    fn touch(&mut self) {
        if self.last.is_none_or(|t| t.elapsed() >= self.often) {
            self.last = Some(Instant::now());
            self.job.touch(self.epoch, self.lease, self.request);
        }
    }
}

/// Bytes of a sample's files.
fn bytes_of(files: &[Found]) -> u64 {
    files.iter().map(|f| f.entry().size).sum()
}

/// Streams samples of a job for one request.
#[derive(Clone)]
struct Reader {
    server: Arc<Server>,
    job: Arc<OpenJob>,
    delivery: Delivery,
    tally: Arc<Tally>,
    component: Component,
}

impl Reader {
    fn new(
        server: &Arc<Server>,
        who: &Principal,
        job: &Arc<OpenJob>,
        epoch: &Epoch,
        component: Component,
    ) -> Answer<Self> {
        let name = job.name();
        let live = server.live_jobs.touch(&who.tenant, &name, server.now_ns())?;
        let source = &job.source;
        let tally = server.accounts.tally(&who.domain, &live, source.version.root(), source.dataset());
        if job.setup.sweep.is_none() {
            let number = job.sources.number();
            let (root, footprint) = (source.version.root(), source.footprint_max());
            server.shares.note(number, root, footprint, ReaderKind::Ordered, server.now_ns());
        }
        let delivery = Delivery::new(&job.setup, source, epoch);
        Ok(Reader { server: Arc::clone(server), job: Arc::clone(job), delivery, tally, component })
    }

    fn charge(&self, class: DeliveryClass) -> impl Fn(Cost) -> Charge + Clone + Send + 'static {
        let (tally, component) = (Arc::clone(&self.tally), self.component);
        move |cost| Charge { tally: Arc::clone(&tally), component, cost: Delivery::cost(class, cost) }
    }

    /// The frames before a sample's bytes, and the bytes; no bytes for a request of references.
    async fn sample(
        &self,
        index: u32,
        entry: u32,
        item: PlanItem,
        class: DeliveryClass,
        files: Answer<Vec<Found>>,
        refs: bool,
    ) -> (Vec<Piece>, Option<What>) {
        let failed = |fault| (Vec::new(), Some(Err(fault)));
        let files = match files {
            Ok(files) => files,
            Err(fault) => return failed(fault),
        };
        let ordinal = self.delivery.ordinal(item.sample);
        let mut head = SampleHead { entry, sample: item.sample, ordinal, copy: item.copy, files: Vec::new() };
        let mut len = 0;
        for found in &files {
            let e = found.entry();
            let Some(hash) = e.hash else { continue };
            head.files.push(SampleFile { path: e.path.replace('\0', "/"), size: e.size, hash });
            len += e.size;
        }
        let mut pieces: Vec<Piece> = json_frame(FrameKind::Sample, index, &head).into();
        if refs {
            return match self.reference(&files, class).await {
                Ok(sample) => {
                    pieces.extend(json_frame(FrameKind::Ref, index, &sample));
                    (pieces, None)
                }
                Err(fault) => failed(fault),
            };
        }
        let class = self.delivery.after_prefetch(entry, class).await;
        match self.bytes(&files, len, class).await {
            Ok(content) => {
                // Bytes that are read later are needed until the entry is acknowledged.
                if let Content::Ready(_) = &content {
                    self.delivery.prefetched_was_read(entry);
                }
                (pieces, Some(Ok((len, content))))
            }
            Err(fault) => failed(fault),
        }
    }

    async fn files(&self, sample: u32) -> Answer<Vec<Found>> {
        let files = self.delivery.files(sample).await?;
        for found in &files {
            content(&found.entry())?;
        }
        Ok(files)
    }

    async fn bytes(&self, files: &[Found], len: u64, class: DeliveryClass) -> Answer<Content> {
        let sources = self.delivery.sources_for(class);
        let source = self.delivery.source();
        let spans: Vec<Span> = files.iter().flat_map(|f| spans(source, f, 0..f.entry().size)).collect();
        let charge = self.charge(class);
        if len > AHEAD_BYTES_MAX {
            let reads = read_all(Arc::clone(&self.server), Arc::clone(sources), spans);
            return Ok(Content::Later(reads.map(move |read| Ok(piece(read?, &charge))).boxed()));
        }
        let ready = spans.iter().map(|s| s.ready(&self.server, sources)).collect::<Option<Vec<_>>>();
        Ok(Content::Ready(match ready {
            Some(cuts) => cuts.into_iter().map(|cut| piece(cut, &charge)).collect(),
            None => read_now(&self.server, sources, spans, charge).await?,
        }))
    }

    /// The chunks in which a sample's bytes lie, and the server to ask for them.
    async fn reference(&self, files: &[Found], class: DeliveryClass) -> Answer<SampleRef> {
        let mut sample = self.delivery.locate(&self.server.versions, files, class).await?;
        sample.owner = self.server.cluster().members.first().map(|m| m.url.clone()).unwrap_or_default();
        Ok(sample)
    }
}

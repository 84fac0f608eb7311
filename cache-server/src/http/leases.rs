//! `POST …/leases`: grants the next samples of an epoch, and streams them while the grant becomes durable.
//!
//! (I2) The end frame leaves after the grant is durable, and while this server is the job's primary. A client
//! uses no sample of a stream without it.

use super::{
    admission::{acquire_read_permit, check_read_permit, record_waits_for},
    epochs::{EpochPath, job_to_change},
    error::{ApiError, ApiResult},
    frames::{Content, Item, ItemResult, coalesce, error_frame, frame_header, item_frames, json_frame},
    job_right::{JobRight, stamped},
    request::read_json,
    response_body::{BodyError, Charge, Piece, body_of_stream, respond},
};
use crate::{
    app::server::Server,
    data::{
        chunk_reads::Asker,
        read_ahead::StreamBudget,
        reads::{Payer, content_hash},
    },
    tenancy::{
        accounting::{Component, Cost, Tally},
        auth::Principal,
    },
    training::{
        benefit::{LeaseTimes, WaitCause},
        epochs::{Delivery, Epoch, Granted, Recorded, SampleBytes},
        jobs::OpenJob,
        sweep::DeliveryClass,
    },
};
use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, Response, StatusCode, header},
};
use bytes::Bytes;
use fletch_api::{
    Code, GrantStatus, LeaseGrant, LeaseRequest, Problem, SampleFile, SampleHead, SampleRef,
    epochs::WAIT_MS_MAX,
    frames::{FrameKind, PREFACE, WHOLE},
    headers,
};
use fletch_core::{delivery::Request, plan::Item as PlanItem};
use fletch_tables::Found;
use futures::{Stream, StreamExt as _, stream, stream::BoxStream};
use parking_lot::{Mutex, MutexGuard};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tracing::{Instrument as _, info_span};

/// A stream without data sends a heartbeat after this time, and sooner if leases are short.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(3);
/// How many samples of a stream are read at once.
const SAMPLES_AT_ONCE: usize = 64;
/// How often a stream renews its lease, at most.
const RENEW_INTERVAL_MAX: Duration = Duration::from_secs(1);

/// Grants the next samples of a rank's worker, and streams them.
///
/// A repeated request (same rank, worker and sequence number) gets the same samples. The stream renews the
/// lease while the client reads it. The request may carry acks of earlier leases. The lease, and these acks,
/// count from the end frame on.
#[utoipa::path(
    post, path = "/v1/jobs/{id}/epochs/{epoch}/leases", tag = "jobs", request_body = LeaseRequest,
    params(
        ("id" = String, Path, description = "Id of the job"),
        ("epoch" = u64, Path,
            description = "Number of the epoch, from 0. The epoch begins with its first request"),
    ),
    responses(
        (status = 200,
            description = "A stream of frames: the grant, a head and the data of each sample, the end",
            content_type = "application/vnd.fletch.frames"),
        (status = 400,
            description = "The world has no such rank, the number of samples is not valid, or an ack \
            does not match its lease", body = Problem,
            content_type = "application/problem+json"),
        (status = 404, description = "The tenant has no such job", body = Problem,
            content_type = "application/problem+json"),
        (status = 409, description = "The sequence number is too old, the lease belongs to another rank, the \
            epoch is closed, its ledger is full, or another process is this rank", body = Problem,
            content_type = "application/problem+json"),
        (status = 410,
            description = "The lease of an ack expired, and its samples are granted again", body = Problem,
            content_type = "application/problem+json"),
        (status = 429,
            description = "The server is at a limit, or the rank waits for its former process. Wait for \
            `Retry-After`, then retry", body = Problem,
            content_type = "application/problem+json"),
        (status = 507,
            description = "The job records and ledgers of the tenant are at their limit. Nothing was granted",
            body = Problem, content_type = "application/problem+json"),
    )
)]
pub async fn post(
    State(server): State<Arc<Server>>,
    principal: Principal,
    path: EpochPath,
    headers_in: HeaderMap,
    body: Body,
) -> ApiResult {
    check_read_permit(&server, &principal.tenant)?;
    let (job, number, right) = job_to_change(&server, &principal, path).await?;
    let request: LeaseRequest = read_json(&server, &principal.tenant, body).await?;
    Epoch::check_want(&request)?;
    job.admit_lease(&request)?;
    let epoch = job.epoch_for_lease(number, &request).await?;
    let wait = Duration::from_millis(request.wait_ms.min(WAIT_MS_MAX)).min(server.limits.io_timeout / 2);
    // Before the grant: the sweep begins to fetch for it.
    epoch.set_costs(tally_of(&server, &principal, &job)?.costs());
    let span =
        info_span!("lease", job = %job.name(), epoch = number, rank = request.rank, worker = request.worker);
    let (granted, recorded) = epoch.lease(&request, Instant::now() + wait).instrument(span).await?;
    // After the wait, so that a request that waits for acks holds no permit. A client without a permit sends
    // the request again, and gets the same lease.
    let permit = acquire_read_permit(&server, &principal.tenant)?;
    let component = headers_in.get(headers::COMPONENT).and_then(|w| w.to_str().ok()).unwrap_or("loader");
    let reader = LeaseReader::new(&server, &principal, &job, &epoch, Component::from_word(component))?;
    let costs = Arc::clone(reader.tally.costs());
    let stamp = right.check()?;
    let pieces = lease_stream(reader, &epoch, &request, granted, (recorded, right));
    let body = body_of_stream(
        &server,
        coalesce(Arc::clone(&server.read_ahead), pieces),
        None,
        Some(permit),
        Some(&costs),
    );
    let head = Response::builder()
        .status(StatusCode::OK)
        .header(header::CONTENT_TYPE, headers::FRAMES)
        .header(header::CACHE_CONTROL, "no-store");
    Ok(stamped(respond(head, body)?, stamp))
}

fn lease_stream(
    reader: LeaseReader,
    epoch: &Epoch,
    request: &LeaseRequest,
    granted: Granted,
    (recorded, right): (Recorded, JobRight),
) -> BoxStream<'static, Result<Piece, BodyError>> {
    let Granted { status, lease, again, entries, left, held } = granted;
    let from = (request.from as usize).min(entries.len());
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
    let begin =
        begin.into_iter().chain(json_frame(FrameKind::Grant, WHOLE, 0, &grant)).map(Ok::<_, BodyError>);
    let count = u32::try_from(entries.len() - from).unwrap_or(u32::MAX);
    let end = frame_header(FrameKind::End, WHOLE, count, 0);
    if status != GrantStatus::Granted {
        return stream::iter(begin.chain([Ok(end)]).collect::<Vec<_>>()).boxed();
    }
    let (refs, number, job) = (request.refs, epoch.number(), Arc::clone(&reader.job));
    let (patience, whole) = (reader.server.limits.io_timeout, grant.entries.len());
    let renewal = LeaseRenewal::new(&reader.job, epoch.number(), request, lease);
    let todo = (0u32..).zip(entries).skip(from);
    let budget = Arc::new(StreamBudget::new(&reader.server.read_ahead));
    let (finder, first) = (reader.clone(), grant.from);
    let items = stream::iter(todo)
        .map(move |(index, (entry, item, class))| {
            let finder = finder.clone();
            async move { (index, entry, item, class, finder.files(item.sample).await) }
        })
        .buffered(SAMPLES_AT_ONCE)
        // In order, so that the sample that is sent next gets memory before later ones.
        .then(move |(index, entry, item, class, files)| {
            let budget = Arc::clone(&budget);
            async move {
                let bytes = files.as_ref().map_or(0, |f| if refs { 0 } else { bytes_of(f) });
                let asked = Instant::now();
                let reservation = budget.reserve(index - first, bytes).await;
                (index, entry, item, class, files, (reservation, asked.elapsed()))
            }
        })
        .map(move |(index, entry, item, class, files, (reservation, queued))| {
            let reader = reader.clone();
            async move {
                let now = reader.delivery.class_now(item, class);
                let begun = Instant::now();
                let (head, result) = reader.sample(index, entry, item, now, files, refs).await;
                reader.delivery.was_read(item, class);
                let read = SampleRead::of(&result);
                if read.cause == WaitCause::Disk {
                    reader.job.setup.context.disk_reads.note(begun, read.bytes);
                }
                let item = result.map(|result| Item { index, name: String::new(), result, reservation });
                (head, item, read, queued)
            }
        })
        .buffered(SAMPLES_AT_ONCE);
    let (times, waited) = (Arc::new(Mutex::new(LeaseTimes { held, ..LeaseTimes::default() })), items.boxed());
    let items = with_times(waited, Arc::clone(&times)).flat_map(|(head, item)| {
        let rest = item.map(|i| item_frames(i).boxed()).unwrap_or_else(|| stream::empty().boxed());
        stream::iter(head.into_iter().map(Ok)).chain(rest)
    });
    stream::iter(begin.collect::<Vec<_>>())
        .chain(with_heartbeats(items.boxed(), renewal))
        .chain(stream::iter([Ok(Piece::EndOfContent)]))
        .chain(
            stream::once(async move {
                // Before the client has all: then its acks can come.
                job.setup.window.note_lease(number, lease, *lock(&times));
                match durable(&recorded, patience).await.and_then(|()| right.check().map(drop)) {
                    Ok(()) => vec![end],
                    Err(error) => error_frame(u32::try_from(whole).unwrap_or(u32::MAX), &error),
                }
            })
            .flat_map(|pieces| stream::iter(pieces).map(Ok)),
        )
        .boxed()
}

/// Waits until a grant is durable.
async fn durable(recorded: &Recorded, patience: Duration) -> ApiResult<()> {
    let error = match tokio::time::timeout(patience, recorded.durable()).await {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => ApiError::from(error),
        Err(_) => ApiError::new(
            Code::Deadline,
            format!("the grant was not durable within {patience:?}"),
            "check the disk of --state-dir",
        ),
    };
    tracing::warn!(code = %error.code(), %error, "a lease was sent and not granted");
    Err(error)
}

/// Where the bytes of a sample came from.
#[derive(Clone, Copy)]
struct SampleRead {
    cause: WaitCause,
    bytes: u64,
    shared_bytes: u64,
}

impl SampleRead {
    /// Judges a sample that was read whole. One that is read while it is sent, or not at all, waits for the
    /// server only.
    fn of(result: &Option<ItemResult>) -> Self {
        let mut read = SampleRead { cause: WaitCause::Queue, bytes: 0, shared_bytes: 0 };
        let Some(Ok((bytes, Content::Buffered(pieces)))) = result else { return read };
        read.bytes = *bytes;
        read.shared_bytes = pieces.iter().map(Piece::shared_bytes).sum();
        read.cause = WaitCause::of(pieces.iter().filter_map(Piece::cost));
        read
    }
}

/// A sample's frames, its bytes, where these came from, and how long it queued for memory.
type TimedItem = (Vec<Piece>, Option<Item>, SampleRead, Duration);

/// Adds to `times` how long the stream is blocked until each sample is there.
fn with_times(
    items: BoxStream<'static, TimedItem>,
    times: Arc<Mutex<LeaseTimes>>,
) -> impl Stream<Item = (Vec<Piece>, Option<Item>)> + Send + 'static {
    stream::unfold((items, times), |(mut items, times)| async move {
        let begun = Instant::now();
        let (head, item, read, queued) = items.next().await?;
        {
            let mut times = lock(&times);
            times.add_wait(read.cause, begun.elapsed(), queued);
            times.entries += 1;
            times.bytes += read.bytes;
            times.shared_bytes += read.shared_bytes;
        }
        Some(((head, item), (items, times)))
    })
}

fn lock(times: &Mutex<LeaseTimes>) -> MutexGuard<'_, LeaseTimes> {
    times.lock()
}

/// Adds heartbeats between items that take long, and renews the lease while the client takes bytes.
///
/// A heartbeat never splits a frame, because nothing is awaited between a frame's header and its bytes.
fn with_heartbeats(
    items: BoxStream<'static, Result<Piece, BodyError>>,
    renewal: LeaseRenewal,
) -> impl Stream<Item = Result<Piece, BodyError>> + Send + 'static {
    stream::unfold((items, renewal), |(mut items, mut renewal)| async move {
        renewal.renew();
        match tokio::time::timeout(HEARTBEAT_INTERVAL.min(renewal.interval * 4), items.next()).await {
            Ok(next) => next.map(|piece| (piece, (items, renewal))),
            Err(_) => Some((Ok(frame_header(FrameKind::Heartbeat, WHOLE, 0, 0)), (items, renewal))),
        }
    })
}

/// Renews a lease while its stream is read.
struct LeaseRenewal {
    job: Arc<OpenJob>,
    epoch: u64,
    lease: u64,
    request: Request,
    interval: Duration,
    last: Option<Instant>,
}

impl LeaseRenewal {
    fn new(job: &Arc<OpenJob>, epoch: u64, request: &LeaseRequest, lease: u64) -> Self {
        let request = Request { rank: request.rank, worker: request.worker, sequence: request.sequence };
        let interval = (job.setup.context.lease_ttl / 8).clamp(Duration::from_millis(25), RENEW_INTERVAL_MAX);
        LeaseRenewal { job: Arc::clone(job), epoch, lease, request, interval, last: None }
    }

    /// Renews the lease, at most once an interval: a renewal takes the epoch's lock.
    ///
    /// It goes through the job, because the job may have reopened the epoch meanwhile.
    fn renew(&mut self) {
        if self.last.is_none_or(|t| t.elapsed() >= self.interval) {
            self.last = Some(Instant::now());
            self.job.touch(self.epoch, self.lease, self.request);
        }
    }
}

/// Returns the account of a job's reads.
fn tally_of(server: &Server, principal: &Principal, job: &OpenJob) -> ApiResult<Arc<Tally>> {
    let live = server.live_job(&principal.tenant, &job.name())?;
    let (root, dataset) = (job.source.version.root(), job.sources.dataset());
    let tally = server.accounts.tally(&principal.domain, &live, root, dataset);
    record_waits_for(tally.costs());
    Ok(tally)
}

/// Returns the bytes of a sample's files.
fn bytes_of(files: &[Found]) -> u64 {
    files.iter().map(|f| f.entry().size).sum()
}

/// Reads samples of a job for one request.
#[derive(Clone)]
struct LeaseReader {
    server: Arc<Server>,
    job: Arc<OpenJob>,
    delivery: Delivery,
    tally: Arc<Tally>,
    component: Component,
}

impl LeaseReader {
    fn new(
        server: &Arc<Server>,
        principal: &Principal,
        job: &Arc<OpenJob>,
        epoch: &Epoch,
        component: Component,
    ) -> ApiResult<Self> {
        let tally = tally_of(server, principal, job)?;
        let delivery = Delivery::new(&job.setup, &job.source, epoch, server.now_ns());
        Ok(LeaseReader { server: Arc::clone(server), job: Arc::clone(job), delivery, tally, component })
    }

    fn charge(&self, class: DeliveryClass) -> impl Fn(Cost) -> Charge + Clone + Send + 'static {
        let (tally, component) = (Arc::clone(&self.tally), self.component);
        move |cost| Charge { tally: Arc::clone(&tally), component, cost: Delivery::cost(class, cost) }
    }

    /// Returns the frames before a sample's bytes, and the bytes. A request for references gets no bytes.
    async fn sample(
        &self,
        index: u32,
        entry: u32,
        item: PlanItem,
        class: DeliveryClass,
        files: ApiResult<Vec<Found>>,
        refs: bool,
    ) -> (Vec<Piece>, Option<ItemResult>) {
        let failed = |error| (Vec::new(), Some(Err(error)));
        let files = match files {
            Ok(files) => files,
            Err(error) => return failed(error),
        };
        let ordinal = self.delivery.ordinal(item.sample);
        let mut head =
            SampleHead { entry, sample: item.sample, ordinal, copy: item.copy, files: Vec::new(), shared: 0 };
        let mut len = 0;
        for found in &files {
            let e = found.entry();
            let Some(hash) = e.hash else { continue };
            head.files.push(SampleFile { path: e.path.replace('\0', "/"), size: e.size, hash });
            len += e.size;
        }
        let frame = |head: &SampleHead| Vec::from(json_frame(FrameKind::Sample, WHOLE, index, head));
        let whole = if class == DeliveryClass::Substituted { len } else { 0 };
        if refs {
            return match self.reference(&files, class).await {
                Ok(sample) => {
                    head.shared = whole;
                    let mut pieces = frame(&head);
                    pieces.extend(json_frame(FrameKind::Ref, WHOLE, index, &sample));
                    (pieces, None)
                }
                Err(error) => failed(error),
            };
        }
        match self.delivery.read(&self.server.reads, &self.payer(), entry, &files, class).await {
            Ok((class, read)) => {
                let content = self.charged(class, read);
                head.shared = match &content {
                    Content::Buffered(read) => read.iter().map(Piece::shared_bytes).sum(),
                    Content::Streamed(_) => whole,
                };
                (frame(&head), Some(Ok((len, content))))
            }
            Err(error) => failed(error.into()),
        }
    }

    fn payer(&self) -> Payer {
        let (tenant, costs) = (self.job.setup.tenant.clone(), Arc::clone(self.tally.costs()));
        Payer { asker: Asker::Client, tenant, costs }
    }

    async fn files(&self, sample: u32) -> ApiResult<Vec<Found>> {
        let files = self.delivery.files(sample).await?;
        for found in &files {
            content_hash(&found.entry())?;
        }
        Ok(files)
    }

    /// Returns bytes with what they are counted as.
    fn charged(&self, class: DeliveryClass, read: SampleBytes) -> Content {
        let charge = self.charge(class);
        match read {
            SampleBytes::Buffered(read) => {
                Content::Buffered(read.into_iter().map(|read| Piece::of_read(read, &charge)).collect())
            }
            SampleBytes::Streamed(reads) => {
                Content::Streamed(reads.map(move |read| Ok(Piece::of_read(read?, &charge))).boxed())
            }
        }
    }

    /// Returns the chunks in which a sample's bytes lie, and the server that has them.
    async fn reference(&self, files: &[Found], class: DeliveryClass) -> ApiResult<SampleRef> {
        let mut sample = self.delivery.locate(&self.server.versions, files, class).await?;
        sample.owner = self.server.cluster.own_url().to_owned();
        Ok(sample)
    }
}

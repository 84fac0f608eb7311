//! An S3-style origin on a loopback port, whose latency, bandwidth and faults a test sets.
//!
//! It serves one bucket: `GET` (with `Range` and `If-Match`), `HEAD`, `PUT` (with `If-None-Match: *`),
//! `DELETE`, listings of both versions, and multipart uploads. It does not check signatures. The time to
//! first byte is log-normal around a median. Bandwidth is limited for each response and for all together.
//! Requests above a rate get `503 SlowDown`.
//!
//! It speaks as AWS does, or with the [`Manners`] of another store.

mod answer;
mod generated;
mod listing;
mod manners;
mod objects;
mod outage;
mod pages;
mod request;
#[cfg(test)]
mod tests;
mod throttle;
mod xml;

pub use manners::{
    Api, Delimiters, Described, HostStyle, KeyEncoding, KeyOrder, Manners, Paging, TagForm, TimeForm, XmlForm,
};
pub use outage::{Outage, Refusal};

use crate::rules::Rules;
use crate::serve::{Server, requests};
use bytes::Bytes;
use objects::Objects;
use outage::Planned;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use throttle::Throttle;
use tokio::sync::watch;

/// The time to first byte: log-normal with these quantiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latency {
    /// Half of the requests take less.
    pub median: Duration,
    /// One in a hundred takes longer.
    pub p99: Duration,
}

/// The origin's behaviour without faults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmulatorConfig {
    /// The name of the only bucket.
    pub bucket: String,
    /// The time before the first byte of each response; `None` for no delay.
    pub first_byte: Option<Latency>,
    /// The bandwidth of one response body, in bytes a second.
    pub stream_bytes_per_s: Option<u64>,
    /// The bandwidth of all response bodies together, in bytes a second.
    pub total_bytes_per_s: Option<u64>,
    /// The most requests a second, with a burst of a tenth of that; more get `503 SlowDown`.
    pub rps_cap: Option<u32>,
    /// The `Retry-After` of each `503`, in seconds.
    pub retry_after_s: u64,
    /// The seed of latencies and of faults with a probability.
    pub seed: u64,
    /// How the origin speaks, until [`OriginEmulator::set_manners`].
    pub manners: Manners,
}

impl Default for EmulatorConfig {
    /// No limits; the bucket's name is `bucket`.
    fn default() -> Self {
        EmulatorConfig {
            bucket: "bucket".to_owned(),
            first_byte: None,
            stream_bytes_per_s: None,
            total_bytes_per_s: None,
            rps_cap: None,
            retry_after_s: 1,
            seed: 0,
            manners: Manners::default(),
        }
    }
}

/// The storage of the objects.
#[derive(Debug, Clone)]
pub enum Backing {
    /// The regular files below a directory; a key is a relative path.
    Directory(PathBuf),
    /// A directory whose sparse files (made by `set_len`) hold bytes generated from this seed and their key.
    ///
    /// The bytes are unique and incompressible, for datasets that are larger than the disk.
    Synthetic(PathBuf, u64),
    /// Memory, with these objects at the start.
    Memory(BTreeMap<String, Bytes>),
    /// Objects that no disk and no memory holds, below `set/`. They cannot be replaced.
    Generated {
        /// The number of objects.
        keys: u64,
        /// The size of each of them, in bytes.
        bytes: u64,
    },
}

impl Backing {
    /// Returns an empty storage in memory.
    #[must_use]
    pub fn empty() -> Self {
        Backing::Memory(BTreeMap::new())
    }
}

/// A fault of the origin. The first four apply to any request; faults of bodies apply to `GET` of objects.
#[derive(Debug, Clone, PartialEq)]
pub enum Fault {
    /// The origin answers with this status, with this probability.
    Error {
        /// The probability, 0.0 to 1.0.
        rate: f64,
        /// The HTTP status.
        status: u16,
    },
    /// The origin answers `503 SlowDown` with this `Retry-After`, in seconds.
    SlowDown {
        /// `None` leaves the header out.
        retry_after_s: Option<u64>,
    },
    /// The origin answers with this error.
    Refuse(Refusal),
    /// The origin reads the request and never answers it.
    Stall,
    /// The origin performs a `PUT` and never answers it.
    LoseAnswer,
    /// The body stops after this number of bytes; the connection stays open.
    StallAfter(u64),
    /// The origin closes the connection after this number of bytes of the body.
    Truncate {
        /// The number of bytes that are sent.
        after: u64,
    },
    /// The body and its `Content-Length` are too short.
    Short {
        /// The number of bytes missing at the end.
        by: u64,
    },
    /// The lowest bit of the object's byte `byte` (modulo its size) is flipped in every response.
    FlipBit {
        /// The offset in the object.
        byte: u64,
    },
    /// Etags change, as if an equal object had replaced the object.
    ChangeEtag,
    /// The origin ignores `If-None-Match`: a `PUT` replaces an existing object.
    IgnoreConditions,
    /// The origin answers a range with `200` and the whole object.
    IgnoreRange,
    /// The origin answers a range with a range that is this many bytes later, and says so in `Content-Range`.
    ShiftRange(u64),
}

/// Counters of requests and responses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// `GET`s of objects.
    pub get: u64,
    /// `HEAD`s.
    pub head: u64,
    /// `PUT`s of objects and of parts.
    pub put: u64,
    /// `DELETE`s of objects and of uploads.
    pub delete: u64,
    /// Pages of listings.
    pub list: u64,
    /// The most pages of listings that were answered at the same time.
    pub lists_at_once: u64,
    /// `POST`s, which begin and complete uploads.
    pub post: u64,
    /// Responses with a status of 400 or above.
    pub refused: u64,
    /// Requests that arrived before a `Retry-After` was over.
    ///
    /// The first quarter of a second does not count: a request may have been on its way when the response was
    /// sent.
    pub early: u64,
    /// Bytes of objects that were given to connections.
    pub bytes_sent: u64,
    /// `GET`s of each key, including those that failed.
    pub gets: BTreeMap<String, u64>,
}

impl Counts {
    /// Returns the number of all requests.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.get + self.head + self.put + self.delete + self.list + self.post
    }
}

/// A running origin on a loopback port, with its own threads. Dropping it stops it.
pub struct OriginEmulator {
    server: Server,
    shared: Arc<Shared>,
}

struct Shared {
    config: EmulatorConfig,
    objects: Objects,
    throttle: Arc<Throttle>,
    faults: Rules<Fault>,
    counts: Mutex<Counts>,
    /// The key id that each request must be signed with. The signature itself is not checked.
    key_id: Mutex<Option<String>>,
    /// The period in which a `Retry-After` forbids requests.
    quiet: Mutex<Option<(Instant, Instant)>>,
    manners: Mutex<Manners>,
    outage: Planned,
    /// The number of pages of listings that are answered now.
    listing: AtomicU64,
    /// Whether the port is open.
    port: watch::Sender<bool>,
    /// The content types of objects that have another one than `application/octet-stream`.
    content_types: Mutex<BTreeMap<String, String>>,
    /// The objects with `Content-Encoding: gzip`, and their bytes without it.
    compressed: Mutex<BTreeMap<String, Bytes>>,
}

/// The time that a request may have been on its way when a `Retry-After` was sent.
const IN_FLIGHT: Duration = Duration::from_millis(250);

impl Shared {
    fn count(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock()
    }

    fn manners(&self) -> Manners {
        self.manners.lock().clone()
    }

    fn content_type(&self, key: &str) -> String {
        self.content_types.lock().get(key).cloned().unwrap_or("application/octet-stream".to_owned())
    }

    /// Returns the plain bytes of an object that is stored with `Content-Encoding: gzip`.
    fn compressed(&self, key: &str) -> Option<Bytes> {
        self.compressed.lock().get(key).cloned()
    }

    /// Whether a request with this `Authorization` is signed with the required key id.
    fn is_signed(&self, authorization: &str) -> bool {
        let required = self.key_id.lock();
        required.as_ref().is_none_or(|id| authorization.contains(&format!("Credential={id}/")))
    }

    /// Whether a `Retry-After` forbids a request now.
    fn is_early(&self) -> bool {
        let quiet = self.quiet.lock();
        quiet.is_some_and(|(from, until)| (from..until).contains(&Instant::now()))
    }

    fn forbid_requests(&self, seconds: u64) {
        let mut quiet = self.quiet.lock();
        let (now, asked) = (Instant::now(), Duration::from_secs(seconds));
        let from = quiet.filter(|(_, until)| now < *until).map_or(now + IN_FLIGHT, |(from, _)| from);
        *quiet = Some((from, now + asked));
    }
}

impl OriginEmulator {
    /// Starts an origin.
    ///
    /// # Panics
    /// If it gets no port or no threads.
    #[must_use]
    pub fn start(config: EmulatorConfig, backing: Backing) -> Self {
        let (port, open) = watch::channel(true);
        let shared = Arc::new(Shared {
            throttle: Arc::new(Throttle::new(&config)),
            objects: Objects::new(backing),
            faults: Rules::new(),
            counts: Mutex::default(),
            key_id: Mutex::new(None),
            quiet: Mutex::new(None),
            manners: Mutex::new(config.manners.clone()),
            outage: Planned::default(),
            listing: AtomicU64::default(),
            port,
            content_types: Mutex::default(),
            compressed: Mutex::default(),
            config,
        });
        let serving = Arc::clone(&shared);
        let server = Server::start_with(open, move |stream| {
            let shared = Arc::clone(&serving);
            requests(stream, Arc::new(move |request| answer::answer(Arc::clone(&shared), request)))
        });
        OriginEmulator { server, shared }
    }

    /// Returns the address on which the origin listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Returns `http://127.0.0.1:PORT`, for `endpoint` of an `[[origin]]` with `allow_http`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.server.address)
    }

    /// Returns `s3://BUCKET`, or `gs://BUCKET` for the API of GCS.
    #[must_use]
    pub fn uri(&self) -> String {
        let scheme = match self.shared.manners().api {
            Api::S3 => "s3",
            Api::Gcs => "gs",
        };
        format!("{scheme}://{}", self.shared.config.bucket)
    }

    /// Speaks with other manners from now on.
    pub fn set_manners(&self, manners: Manners) {
        *self.shared.manners.lock() = manners;
    }

    /// Lets the whole store fail after `requests` more requests, until [`OriginEmulator::end_outage`].
    pub fn fail_after(&self, requests: u64, outage: Outage) {
        self.shared.outage.set(Some((requests, outage)));
    }

    /// Ends an outage, and opens the port again if the outage closed it.
    ///
    /// # Panics
    /// If another program took the port.
    pub fn end_outage(&self) {
        self.shared.outage.set(None);
        self.shared.port.send_replace(true);
        let until = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(self.server.address).is_err() {
            assert!(Instant::now() < until, "port {} is open again", self.server.address);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Applies a fault to the next `times` requests whose key begins with `prefix`; to all of them if `None`.
    ///
    /// For a listing, its own prefix takes the place of the key.
    pub fn set_fault(&self, prefix: &str, fault: Fault, times: Option<u32>) {
        self.shared.faults.add(prefix, fault, times);
    }

    /// Answers 403 to every request that is not signed with this key id. `None`: to none.
    pub fn require_key(&self, key_id: Option<&str>) {
        let mut required = self.shared.key_id.lock();
        *required = key_id.map(str::to_owned);
    }

    /// Limits what all streams send together from now on, in bytes a second.
    pub fn set_bandwidth(&self, total_bytes_per_s: Option<u64>) {
        self.shared.throttle.set_total(total_bytes_per_s);
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        self.shared.faults.clear();
    }

    /// Returns the counters.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.count().clone()
    }

    /// Sets all counters to zero.
    pub fn reset_counts(&self) {
        *self.shared.count() = Counts::default();
    }

    /// Writes an object without a request.
    ///
    /// # Panics
    /// If the backing directory cannot be written.
    pub fn insert(&self, key: &str, bytes: impl Into<Bytes>) {
        self.shared.objects.put(key, bytes.into()).expect("the emulator's directory can be written");
    }

    /// Makes a folder as the consoles of S3 and GCS do: an empty object whose key ends in `/`.
    ///
    /// # Panics
    /// As [`OriginEmulator::insert`].
    pub fn console_folder(&self, folder: &str) {
        let kind = match self.shared.manners().api {
            Api::S3 => "application/x-directory; charset=UTF-8",
            Api::Gcs => "text/plain",
        };
        let key = format!("{folder}/");
        self.shared.content_types.lock().insert(key.clone(), kind.to_owned());
        self.insert(&key, "");
    }

    /// Writes an object that is stored with `Content-Encoding: gzip`.
    ///
    /// GCS sends the `plain` bytes, whole, to a client that does not accept gzip.
    ///
    /// # Panics
    /// As [`OriginEmulator::insert`].
    pub fn insert_compressed(&self, key: &str, gzip: impl Into<Bytes>, plain: impl Into<Bytes>) {
        self.shared.compressed.lock().insert(key.to_owned(), plain.into());
        self.insert(key, gzip);
    }

    /// Returns the content of an object, if it exists.
    #[must_use]
    pub fn object(&self, key: &str) -> Option<Bytes> {
        let object = self.shared.objects.find(key)?;
        object.read(0..object.size).ok()
    }
}

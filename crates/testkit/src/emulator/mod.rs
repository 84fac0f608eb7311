//! An S3-style origin on a loopback port: slow, limited and faulty as a test wishes, and counted.
//!
//! Path style, one bucket: `GET` (with `Range` and `If-Match`), `HEAD`, `PUT` (with
//! `If-None-Match: *`), `DELETE`, ListObjectsV2 in byte order, multipart uploads. Signatures are
//! not looked at. The time to first byte is log-normal around a median; bandwidth is limited for
//! each response and for all together; requests above a rate get `503 SlowDown`.

mod answer;
mod objects;
mod shape;
mod xml;

use crate::rules::Rules;
use crate::serve::{Server, requests};
use bytes::Bytes;
use objects::Objects;
use shape::Shape;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time to first byte: log-normal with these quantiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latency {
    /// Half of the requests take less.
    pub median: Duration,
    /// One in a hundred takes longer.
    pub p99: Duration,
}

/// How the origin behaves when nothing is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmulatorConfig {
    /// The only bucket there is.
    pub bucket: String,
    /// Time before the first byte of each answer; none means at once.
    pub first_byte: Option<Latency>,
    /// Most bytes a second of one response body.
    pub stream_bytes_per_s: Option<u64>,
    /// Most bytes a second of all response bodies together.
    pub total_bytes_per_s: Option<u64>,
    /// Most requests a second, with a burst of a tenth of it; above come `503 SlowDown`.
    pub rps_cap: Option<u32>,
    /// What `Retry-After` says on each `503`, seconds.
    pub retry_after_s: u64,
    /// Seed of latencies and of faults that happen at a rate.
    pub seed: u64,
}

impl Default for EmulatorConfig {
    /// As fast as it can, bucket `bucket`.
    fn default() -> Self {
        EmulatorConfig {
            bucket: "bucket".to_owned(),
            first_byte: None,
            stream_bytes_per_s: None,
            total_bytes_per_s: None,
            rps_cap: None,
            retry_after_s: 1,
            seed: 0,
        }
    }
}

/// Where the objects are.
#[derive(Debug, Clone)]
pub enum Backing {
    /// The regular files below a directory; a key is a relative path.
    Directory(PathBuf),
    /// The same, but a file that has a length and occupies nothing (as `set_len` makes it) holds bytes that follow from this seed
    /// and its key: unique and incompressible, for datasets that are larger than the disk.
    Sown(PathBuf, u64),
    /// In memory, beginning with these.
    Memory(BTreeMap<String, Bytes>),
}

impl Backing {
    /// Nothing, in memory.
    #[must_use]
    pub fn empty() -> Self {
        Backing::Memory(BTreeMap::new())
    }
}

/// What goes wrong. Faults of bodies concern `GET` of objects; the first four any
/// request.
#[derive(Debug, Clone, PartialEq)]
pub enum Fault {
    /// This status, with this probability.
    Error {
        /// 0.0 to 1.0.
        rate: f64,
        /// The status.
        status: u16,
    },
    /// `503 SlowDown` with this `Retry-After`, seconds.
    SlowDown {
        /// None leaves the header out.
        retry_after_s: Option<u64>,
    },
    /// The request is read and never answered.
    Stall,
    /// A `PUT` is done, but its answer is lost: the client waits for ever.
    LoseAnswer,
    /// The body stops after so many bytes and the connection stays open.
    StallAfter(u64),
    /// The connection is closed after so many bytes of the body.
    Truncate {
        /// Bytes that are sent.
        after: u64,
    },
    /// The body, and the length that is announced for it, is so many bytes too short.
    Short {
        /// Bytes missing at the end.
        by: u64,
    },
    /// One bit of the object's byte `byte` (modulo its size) is wrong whenever it is sent.
    FlipBit {
        /// Offset in the object.
        byte: u64,
    },
    /// Etags are others than before, as if the object had been replaced by an equal one.
    ChangeEtag,
    /// `If-None-Match` is ignored, silently: whatever is there is replaced.
    IgnoreConditions,
    /// A range is answered with `200` and the whole object.
    IgnoreRange,
    /// A range is answered with one that begins so many bytes later, and says so.
    ShiftRange(u64),
}

/// What was asked and answered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// `GET` of objects.
    pub get: u64,
    /// `HEAD`.
    pub head: u64,
    /// `PUT` of objects and of parts.
    pub put: u64,
    /// `DELETE` of objects and of uploads.
    pub delete: u64,
    /// Pages of listings.
    pub list: u64,
    /// `POST`: beginnings and ends of uploads.
    pub post: u64,
    /// Answers with a status of 400 and above.
    pub refused: u64,
    /// Requests that came although a `Retry-After` was not over; those of the first quarter of a
    /// second, which may have been under way when it was sent, are not counted.
    pub early: u64,
    /// Bytes of objects handed to connections.
    pub bytes_sent: u64,
    /// `GET`s of each key, also those that failed.
    pub gets: BTreeMap<String, u64>,
}

impl Counts {
    /// All requests.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.get + self.head + self.put + self.delete + self.list + self.post
    }
}

/// The origin, on a loopback port and with threads of its own. Dropping it stops it.
pub struct OriginEmulator {
    server: Server,
    shared: Arc<Shared>,
}

struct Shared {
    config: EmulatorConfig,
    objects: Objects,
    shape: Arc<Shape>,
    faults: Rules<Fault>,
    counts: Mutex<Counts>,
    /// From when until when nobody should ask.
    quiet: Mutex<Option<(Instant, Instant)>>,
}

/// What may have been under way when a `Retry-After` was sent.
const UNDER_WAY: Duration = Duration::from_millis(250);

impl Shared {
    fn count(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request that comes now was asked not to.
    fn is_early(&self) -> bool {
        let quiet = self.quiet.lock().unwrap_or_else(PoisonError::into_inner);
        quiet.is_some_and(|(from, until)| (from..until).contains(&Instant::now()))
    }

    fn ask_for_quiet(&self, seconds: u64) {
        let mut quiet = self.quiet.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, asked) = (Instant::now(), Duration::from_secs(seconds));
        let from = quiet.filter(|(_, until)| now < *until).map_or(now + UNDER_WAY, |(from, _)| from);
        *quiet = Some((from, now + asked));
    }
}

impl OriginEmulator {
    /// Starts one.
    ///
    /// # Panics
    /// When it gets no port or threads.
    #[must_use]
    pub fn start(config: EmulatorConfig, backing: Backing) -> Self {
        let shared = Arc::new(Shared {
            shape: Arc::new(Shape::new(&config)),
            objects: Objects::new(backing),
            faults: Rules::new(),
            counts: Mutex::default(),
            quiet: Mutex::new(None),
            config,
        });
        let serving = Arc::clone(&shared);
        let server = Server::start(move |stream| {
            let shared = Arc::clone(&serving);
            requests(stream, Arc::new(move |request| answer::answer(Arc::clone(&shared), request)))
        });
        OriginEmulator { server, shared }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// `http://127.0.0.1:PORT`, for `endpoint` of an `[[origin]]` with `allow_http`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.server.address)
    }

    /// `s3://BUCKET`.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("s3://{}", self.shared.config.bucket)
    }

    /// From now on this happens to requests for keys (listings: prefixes) that begin with
    /// `prefix`, `times` times or for ever.
    pub fn set_fault(&self, prefix: &str, fault: Fault, times: Option<u32>) {
        self.shared.faults.add(prefix, fault, times);
    }

    /// From now on nothing goes wrong.
    pub fn clear_faults(&self) {
        self.shared.faults.clear();
    }

    /// What was asked so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.count().clone()
    }

    /// Counts from zero again.
    pub fn reset_counts(&self) {
        *self.shared.count() = Counts::default();
    }

    /// Writes an object behind the clients' backs.
    ///
    /// # Panics
    /// When the backing directory cannot be written.
    pub fn insert(&self, key: &str, bytes: impl Into<Bytes>) {
        self.shared.objects.put(key, bytes.into()).expect("the emulator's directory can be written");
    }

    /// The object, if there is one.
    #[must_use]
    pub fn object(&self, key: &str) -> Option<Bytes> {
        let object = self.shared.objects.find(key)?;
        object.read(0..object.size).ok()
    }
}

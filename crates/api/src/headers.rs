//! The names of Fletch's headers and media types. Header names are in lower case, as HTTP libraries expect.

/// The job that the bytes are accounted to, a [`fletch_core::JobName`]. The default is [`JOB_ANONYMOUS`].
pub const JOB: &str = "fletch-job";
/// The dataset through which the client reads a version, a [`fletch_core::DatasetName`].
///
/// The server asks that dataset's origin first, and accounts the bytes to it.
pub const DATASET: &str = "fletch-dataset";
/// The number of the member view by which the client chose the server.
pub const VIEW: &str = "fletch-view";
/// The component that sends the request: `mount`, `loader`, `cli` or `peer`. Other values count as `other`.
pub const COMPONENT: &str = "fletch-component";
/// The id of the request: 1 to 64 ASCII letters, digits, `-`, `_`, `.` and `:`. The reply repeats it. A
/// server draws one for a request without it.
pub const REQUEST_ID: &str = "x-request-id";
/// The domain for which another server of the cluster asks. Only routes of peers have it.
pub const DOMAIN: &str = "fletch-domain";
/// As what the bytes of a reply to a peer count: `hit`, `miss` or `bypass`.
pub const RESULT: &str = "fletch-result";
/// The protection of a chunk for a warm-up of another server: the warm-up's id, a space, and seconds.
pub const PIN: &str = "fletch-pin";
/// The member that owns a chunk by the view of the server that replies: its id, a space, and its URL. In the
/// answer of a server that does not have the job: the id of the member that has it.
pub const OWNER: &str = "fletch-owner";
/// By which right a server of a cluster answers for a job, a [`crate::TermStamp`]: the job's group, a space,
/// its term, a space, and for how many milliseconds the server is its primary at least.
pub const TERM: &str = "fletch-term";
/// The hash of the bytes of a reply, if they were requested by the name of their place: those of a draft.
pub const CONTENT: &str = "fletch-content";
/// How the cache handled the request (RFC 9211).
pub const CACHE_STATUS: &str = "cache-status";
/// The root of the version that a tag named at the time of the answer.
pub const ROOT: &str = "fletch-root";

/// The job of requests without the header [`JOB`].
pub const JOB_ANONYMOUS: &str = "anonymous";

/// The media type of JSON, which every body but a ledger has.
pub const JSON: &str = "application/json";
/// The media type of a stream of [`crate::frames`].
pub const FRAMES: &str = "application/vnd.fletch.frames";
/// The media type of an epoch's ledger and of its state.
pub const LEDGER: &str = "application/vnd.fletch.ledger";
/// The media type of a chunk that one server offers another.
pub const CHUNK: &str = "application/vnd.fletch.chunk";
/// The media type of a tar archive.
pub const TAR: &str = "application/x-tar";
/// The media type of a [`crate::Problem`].
pub const PROBLEM: &str = "application/problem+json";

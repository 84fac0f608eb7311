//! Names of headers and media types that only Fletch uses, in the lower case HTTP libraries want.

/// Which job the bytes are for (a [`fletch_core::JobName`]); absent means the job [`JOB_ANONYMOUS`].
pub const JOB: &str = "fletch-job";
/// The number of the cluster view that the client placed this request by.
pub const VIEW: &str = "fletch-view";
/// Which component asks: `mount`, `loader`, `cli` or `peer`; anything else counts as `other`.
pub const COMPONENT: &str = "fletch-component";
/// How the answer was made (RFC 9211).
pub const CACHE_STATUS: &str = "cache-status";
/// The root of the version that a tag named when the answer was made.
pub const ROOT: &str = "fletch-root";

/// The job of requests without a [`JOB`] header.
pub const JOB_ANONYMOUS: &str = "anonymous";

/// Media type of a stream of [`crate::frames`].
pub const FRAMES: &str = "application/vnd.fletch.frames";
/// Media type of an epoch's ledger, and of its state.
pub const LEDGER: &str = "application/vnd.fletch.ledger";
/// Media type of a tar archive.
pub const TAR: &str = "application/x-tar";
/// Media type of [`crate::Problem`].
pub const PROBLEM: &str = "application/problem+json";

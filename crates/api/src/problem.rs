//! Problems: the error answers of the API (RFC 9457), with a stable code and a hint.
//!
//! Only this module maps a [`Kind`] to an HTTP status.

use fletch_core::Kind;
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, fmt};
use utoipa::ToSchema;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $kind:ident, $status:expr, $title:literal;)*) => {
        /// The stable code of a problem.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
        pub enum Code {
            $($(#[$doc])* #[serde(rename = $word)] $name,)*
            /// A code that this build does not know, from a newer server.
            #[serde(other, rename = "unknown")]
            Unknown,
        }

        impl Code {
            /// Every code that this build knows.
            pub const ALL: &[Code] = &[$(Code::$name),*];

            /// Returns the word that JSON uses.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Code::$name => $word,)*
                    Code::Unknown => "unknown",
                }
            }

            /// Returns who can act on the problem.
            #[must_use]
            pub fn kind(self) -> Kind {
                match self {
                    $(Code::$name => Kind::$kind,)*
                    Code::Unknown => Kind::Internal,
                }
            }

            /// Returns the title of the problem.
            #[must_use]
            pub fn title(self) -> &'static str {
                match self {
                    $(Code::$name => $title,)*
                    Code::Unknown => "an error that this client does not know",
                }
            }

            /// Returns the HTTP status, if it differs from that of the kind.
            fn own_status(self) -> Option<u16> {
                match self {
                    $(Code::$name => $status,)*
                    Code::Unknown => None,
                }
            }
        }
    };
}

codes! {
    /// The object does not exist, or the caller may not see it.
    NotFound = "not_found", NotFound, None, "not found";
    /// The dataset has no version yet: its tables location has no tag.
    NotIndexed = "not_indexed", NotFound, None, "not indexed yet";
    /// The request cannot be parsed or has an invalid value.
    BadRequest = "bad_request", Invalid, None, "the request is not valid";
    /// The request has no token, or a token that the server does not know.
    Unauthorized = "unauthorized", Invalid, Some(401), "a valid token is required";
    /// The role of the caller does not allow the request.
    Forbidden = "forbidden", Invalid, Some(403), "the role does not allow this request";
    /// The server takes requests only with a client certificate, and the connection has none.
    CertificateRequired = "certificate_required", Invalid, Some(403), "a client certificate is required";
    /// The request would exceed the tenant's quota.
    QuotaExceeded = "quota_exceeded", Invalid, Some(403), "the tenant's quota is exceeded";
    /// The version is a draft: its content is not known yet, and the request needs it.
    NotSealed = "not_sealed", Invalid, Some(409), "the version is a draft";
    /// The header `Fletch-Job` is not a valid job name.
    BadJob = "bad_job", Invalid, None, "the job name is not valid";
    /// The plan, the order or the world of the job is not valid.
    BadPlan = "bad_plan", Invalid, None, "the plan is not valid";
    /// The ledger is damaged or belongs to another dataset, so it cannot be replayed.
    BadLedger = "bad_ledger", Invalid, None, "the ledger cannot be replayed";
    /// A job with this name exists and has other settings.
    JobDiffers = "job_differs", Invalid, Some(409), "a job with this name has other settings";
    /// The world of the job has no such rank.
    BadRank = "bad_rank", Invalid, None, "the world has no such rank";
    /// Another process has the rank, and lives.
    RankInUse = "rank_in_use", Invalid, Some(409), "another process is this rank";
    /// Another process took over the rank.
    RankTaken = "rank_taken", Invalid, Some(409), "another process took over this rank";
    /// Another process had the rank, and may still live. Ask again.
    RankWaits = "rank_waits", Overloaded, None, "the rank waits for its former process";
    /// The worker has already used a higher sequence number.
    StaleSequence = "stale_sequence", Invalid, Some(409), "the sequence number is too low";
    /// The lease has expired, was released or never existed. Its entries may be in another lease.
    LeaseGone = "lease_gone", Invalid, Some(410), "the lease is gone";
    /// The lease belongs to another rank.
    LeaseForeign = "lease_foreign", Invalid, Some(409), "the lease belongs to another rank";
    /// The ack names more entries than the lease has.
    BadAck = "bad_ack", Invalid, None, "the ack does not fit its lease";
    /// The epoch is finished or abandoned and takes no leases or acks.
    EpochClosed = "epoch_closed", Invalid, Some(409), "the epoch is closed";
    /// The ledger of the epoch has reached its limit. The server grants no more entries.
    LedgerFull = "ledger_full", Invalid, Some(409), "the epoch's ledger is full";
    /// The job records and ledgers of the tenant have reached their limit. The server keeps no more of them.
    StateFull = "state_full", Invalid, Some(507), "the tenant's jobs and ledgers are full";
    /// The epoch is not finished, so it has no receipt.
    EpochOpen = "epoch_open", Invalid, Some(409), "the epoch is not finished";
    /// The number of ranks cannot change in the middle of a step.
    MidStep = "mid_step", Invalid, Some(409), "the epoch is in the middle of a step";
    /// The state belongs to another root, plan, order, seed or epoch.
    StateDiffers = "state_differs", Invalid, Some(409), "the state does not fit the epoch";
    /// The epoch has progressed beyond the state.
    StateBehind = "state_behind", Invalid, Some(409), "the epoch is further than the state";
    /// The state cannot be parsed.
    BadState = "bad_state", Invalid, None, "the state is not valid";
    /// The checkpoint is not known, or the job's visitation is not `checkpoint`.
    NoCommit = "no_commit", Invalid, Some(409), "no such checkpoint";
    /// The route does not support the HTTP method.
    MethodNotAllowed = "method_not_allowed", Invalid, Some(405), "method not allowed";
    /// The name is taken by something else.
    Conflict = "conflict", Invalid, Some(409), "the name is taken";
    /// The server knows the bucket of that name at another store.
    StoreDiffers = "store_differs", Invalid, Some(409), "the bucket of that name is at another store";
    /// The server may not read the URI.
    UriNotAllowed = "uri_not_allowed", Invalid, Some(403), "the server may not read this URI";
    /// The request body is longer than the limit.
    BodyTooLarge = "body_too_large", Invalid, Some(413), "the request body is too large";
    /// The header `If-Match` names another representation than the current one.
    PreconditionFailed = "precondition_failed", Invalid, Some(412), "a precondition does not hold";
    /// The request names another host than this server.
    Misdirected = "misdirected", Invalid, Some(421), "the request is for another host";
    /// Another server of the cluster owns the chunk. Only routes of peers answer so.
    WrongServer = "wrong_server", Invalid, Some(421), "another server owns the chunk";
    /// Another server of the cluster has the job. `Location` is the same request there.
    JobElsewhere = "job_elsewhere", Invalid, Some(307), "another server has the job";
    /// A web page of another site sent the request.
    CrossSite = "cross_site", Invalid, Some(403), "a web page of another site sent the request";
    /// The body is not of a type that the route takes.
    UnsupportedType = "unsupported_type", Invalid, Some(415), "the type of the body is not supported";
    /// The range begins after the last byte.
    RangeNotSatisfiable = "range_not_satisfiable", Invalid, Some(416), "the range is past the end";
    /// The request header is longer than the limit.
    HeaderTooLarge = "header_too_large", Invalid, Some(431), "the request header is too large";
    /// The entry is a link or a directory, which has no bytes.
    NotAFile = "not_a_file", Invalid, None, "the entry is not a file";
    /// An object at the origin differs from the one that was indexed.
    OriginChanged = "origin_changed", Corrupt, None, "an object changed after it was indexed";
    /// An object at the origin seems unchanged but has other bytes.
    OriginCorrupt = "origin_corrupt", Corrupt, None, "the origin returned bytes with a wrong hash";
    /// An indexed object no longer exists at the origin.
    OriginMissing = "origin_missing", Corrupt, None, "an indexed object is missing at the origin";
    /// The origin's answer does not fit the request, or its `[[origin]]` does not fit the origin.
    OriginInvalid = "origin_invalid", Corrupt, None, "the origin's answer cannot be used";
    /// The origin rejected the server's credentials.
    OriginDenied = "origin_denied", Corrupt, None, "the origin denied access";
    /// The tables of the version contradict each other or the root.
    TablesCorrupt = "tables_corrupt", Corrupt, None, "the version's tables are damaged";
    /// The version's tables have a format that this server does not support.
    UnsupportedFormat = "unsupported_format", Corrupt, None, "the version's format is not supported";
    /// The origin did not answer in time.
    OriginUnavailable = "origin_unavailable", Unavailable, None, "the origin is not available";
    /// The request took longer than its deadline.
    Deadline = "deadline", Unavailable, Some(504), "the request took too long";
    /// The server is starting or stopping.
    NotReady = "not_ready", Unavailable, None, "the server is not ready";
    /// The server of the cluster that has the job is away.
    JobWaits = "job_waits", Unavailable, None, "the job waits for its server";
    /// The Prometheus of the server's settings did not answer a query of the admin page.
    PrometheusFailed = "prometheus_failed", Unavailable, None, "Prometheus did not answer";
    /// The server has reached a limit. Wait, then retry.
    Overloaded = "overloaded", Overloaded, None, "the server is at its limit";
    /// The server has a defect.
    Internal = "internal", Internal, None, "internal error";
}

impl Code {
    /// Returns the HTTP status.
    #[must_use]
    pub fn status(self) -> u16 {
        self.own_status().unwrap_or(match self.kind() {
            Kind::NotFound => 404,
            Kind::Invalid => 400,
            Kind::Corrupt => 502,
            Kind::Unavailable => 503,
            Kind::Overloaded => 429,
            Kind::Internal => 500,
        })
    }

    /// Returns whether the same request may succeed later without any change.
    #[must_use]
    pub fn retryable(self) -> bool {
        self.kind().retryable()
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The body of every error answer and of every error frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The type of the problem: `urn:fletch:problem:<code>`.
    #[serde(rename = "type")]
    pub type_uri: String,
    /// The title: the same for every problem with this code.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What happened in this request.
    pub detail: String,
    /// The stable code.
    pub code: Code,
    /// What a person can do about the problem. May be empty.
    #[serde(default)]
    pub hint: String,
    /// Whether a retry may succeed.
    pub retryable: bool,
}

impl Problem {
    /// Returns a problem with the title, status and retryability of its code.
    #[must_use]
    pub fn new(code: Code, detail: impl Into<String>, hint: impl Into<Cow<'static, str>>) -> Self {
        Problem {
            type_uri: format!("urn:fletch:problem:{code}"),
            title: code.title().to_owned(),
            status: code.status(),
            detail: detail.into(),
            code,
            hint: hint.into().into_owned(),
            retryable: code.retryable(),
        }
    }

    /// Returns what happened, without the hint: for a caller that prints the hint by itself.
    #[must_use]
    pub fn summary(&self) -> String {
        format!("{}: {} ({})", self.title, self.detail, self.code)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary())?;
        if self.hint.is_empty() { Ok(()) } else { write!(f, "; {}", self.hint) }
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_status_word_and_retryability() {
        for &code in Code::ALL {
            let word = serde_json::to_string(&code).expect("json");
            assert_eq!(word, format!("\"{code}\""));
            assert_eq!(serde_json::from_str::<Code>(&word).expect("known"), code);
            let is_error = (400..600).contains(&code.status());
            assert_eq!(is_error, code != Code::JobElsewhere, "{code}: a place elsewhere is no error");
            assert_eq!(code.retryable(), matches!(code.status(), 429 | 503 | 504), "{code}");
        }
    }

    #[test]
    fn a_newer_servers_code_is_read_as_unknown() {
        let text = concat!(
            r#"{"type":"urn:fletch:problem:x","title":"t","status":599,"#,
            r#""detail":"d","code":"x","retryable":false}"#
        );
        let p: Problem = serde_json::from_str(text).expect("readable");
        assert_eq!((p.code, p.status, p.hint.as_str()), (Code::Unknown, 599, ""));
    }
}

//! Errors on the wire (RFC 9457), with a stable code, a hint a person can act on, and whether
//! asking again may help. The only place where a [`Kind`] becomes an HTTP status.

use fletch_core::Kind;
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, fmt};
use utoipa::ToSchema;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $kind:ident, $status:expr, $title:literal;)*) => {
        /// What went wrong, by a stable word.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
        pub enum Code {
            $($(#[$doc])* #[serde(rename = $word)] $name,)*
            /// A code of a newer server.
            #[serde(other, rename = "unknown")]
            Unknown,
        }

        impl Code {
            /// Every code this build knows.
            pub const ALL: &[Code] = &[$(Code::$name),*];

            /// The word on the wire.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Code::$name => $word,)*
                    Code::Unknown => "unknown",
                }
            }

            /// Who can act on it.
            #[must_use]
            pub fn kind(self) -> Kind {
                match self {
                    $(Code::$name => Kind::$kind,)*
                    Code::Unknown => Kind::Internal,
                }
            }

            /// One line for people.
            #[must_use]
            pub fn title(self) -> &'static str {
                match self {
                    $(Code::$name => $title,)*
                    Code::Unknown => "an error this client does not know",
                }
            }

            /// A status that says more than the kind's own, where HTTP has one.
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
    /// It does not exist, or not for this principal.
    NotFound = "not_found", NotFound, None, "not found";
    /// The request cannot be understood.
    BadRequest = "bad_request", Invalid, None, "the request is not valid";
    /// No token, or none that this server knows.
    Unauthorized = "unauthorized", Invalid, Some(401), "a token is needed";
    /// The token's role does not allow it.
    Forbidden = "forbidden", Invalid, Some(403), "this token may not do that";
    /// It would go over the tenant's quota.
    QuotaExceeded = "quota_exceeded", Invalid, Some(403), "the tenant's quota is exceeded";
    /// `Fletch-Job` is no job name.
    BadJob = "bad_job", Invalid, None, "the job name is not valid";
    /// The plan, the order or the world of a job cannot be.
    BadPlan = "bad_plan", Invalid, None, "the plan cannot be";
    /// The ledger is damaged, or of something else: it cannot be replayed.
    BadLedger = "bad_ledger", Invalid, None, "the ledger cannot be replayed";
    /// A job of that name has other settings.
    JobDiffers = "job_differs", Invalid, Some(409), "a job of that name has other settings";
    /// The world has no such rank.
    BadRank = "bad_rank", Invalid, None, "the world has no such rank";
    /// The worker asked with a later sequence number already.
    StaleSequence = "stale_sequence", Invalid, Some(409), "the sequence number is behind";
    /// The lease has expired, or never was: its entries may be someone else's.
    LeaseGone = "lease_gone", Invalid, Some(410), "the lease is gone";
    /// The lease is another rank's.
    LeaseForeign = "lease_foreign", Invalid, Some(409), "the lease is another rank's";
    /// More entries than the lease holds.
    BadAck = "bad_ack", Invalid, None, "the ack does not fit its lease";
    /// The epoch takes no leases or acks any more.
    EpochClosed = "epoch_closed", Invalid, Some(409), "the epoch is closed";
    /// The epoch's ledger is at its bound: nothing more is granted.
    LedgerFull = "ledger_full", Invalid, Some(409), "the epoch's ledger is full";
    /// The epoch is not finished, so there is no receipt.
    EpochOpen = "epoch_open", Invalid, Some(409), "the epoch is not finished";
    /// The number of ranks cannot change in the middle of a step.
    MidStep = "mid_step", Invalid, Some(409), "the epoch is in the middle of a step";
    /// The state is of another root, plan, order, seed or epoch.
    StateDiffers = "state_differs", Invalid, Some(409), "the state is of something else";
    /// The epoch went on already.
    StateBehind = "state_behind", Invalid, Some(409), "the epoch is further than the state";
    /// The state is no state.
    BadState = "bad_state", Invalid, None, "the state cannot be read";
    /// There is no such commit to roll back to, or the job's visitation knows none.
    NoCommit = "no_commit", Invalid, Some(409), "no such commit";
    /// The route exists, the method does not.
    MethodNotAllowed = "method_not_allowed", Invalid, Some(405), "method not allowed";
    /// A name is taken by something else.
    Conflict = "conflict", Invalid, Some(409), "the name is taken";
    /// This server may not read that place.
    UriNotAllowed = "uri_not_allowed", Invalid, Some(403), "this server may not read that URI";
    /// The body is longer than the limit.
    BodyTooLarge = "body_too_large", Invalid, Some(413), "the request body is too large";
    /// No byte of the range exists.
    RangeNotSatisfiable = "range_not_satisfiable", Invalid, Some(416), "the range is past the end";
    /// The header is longer than the limit.
    HeaderTooLarge = "header_too_large", Invalid, Some(431), "the request header is too large";
    /// The entry has no bytes (a link or a directory).
    NotAFile = "not_a_file", Invalid, None, "the entry is not a file";
    /// An object is not the one that was indexed.
    OriginChanged = "origin_changed", Corrupt, None, "an object changed after it was indexed";
    /// An object that seems unchanged has other bytes.
    OriginCorrupt = "origin_corrupt", Corrupt, None, "the origin returned bytes that do not hash to their name";
    /// An indexed object is gone.
    OriginMissing = "origin_missing", Corrupt, None, "an indexed object is gone";
    /// The origin refuses this server.
    OriginDenied = "origin_denied", Corrupt, None, "the origin denied access";
    /// A version's tables contradict themselves or their root.
    TablesCorrupt = "tables_corrupt", Corrupt, None, "the version's tables are damaged";
    /// The tables are of a newer format.
    UnsupportedFormat = "unsupported_format", Corrupt, None, "the version is of a newer format";
    /// The origin did not answer in time.
    OriginUnavailable = "origin_unavailable", Unavailable, None, "the origin is not available";
    /// The request took longer than its deadline.
    Deadline = "deadline", Unavailable, Some(504), "the request took too long";
    /// The server is starting or stopping.
    NotReady = "not_ready", Unavailable, None, "the server is not ready";
    /// A limit was reached; wait and ask again.
    Overloaded = "overloaded", Overloaded, None, "the server is at its limit";
    /// A defect of the server.
    Internal = "internal", Internal, None, "internal error";
}

impl Code {
    /// The HTTP status.
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

    /// Whether the same request may succeed later without anyone changing anything.
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

/// The body of every error answer, and of every error frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// `urn:fletch:problem:<code>`.
    #[serde(rename = "type")]
    pub type_uri: String,
    /// One line, the same for every occurrence.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What happened this time.
    pub detail: String,
    /// The stable word.
    pub code: Code,
    /// What a person can do about it; may be empty.
    #[serde(default)]
    pub hint: String,
    /// Whether asking again may help.
    pub retryable: bool,
}

impl Problem {
    /// A problem with its code's own title, status and retryability.
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
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.title, self.detail, self.code)?;
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
            assert!((400..600).contains(&code.status()), "{code}");
            assert_eq!(code.retryable(), matches!(code.status(), 429 | 503 | 504), "{code}");
        }
    }

    #[test]
    fn a_newer_servers_code_is_read_as_unknown() {
        let text = r#"{"type":"urn:fletch:problem:x","title":"t","status":599,"detail":"d","code":"x","retryable":false}"#;
        let p: Problem = serde_json::from_str(text).expect("readable");
        assert_eq!((p.code, p.status, p.hint.as_str()), (Code::Unknown, 599, ""));
    }
}

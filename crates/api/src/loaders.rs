//! Loaders: the processes that read as a rank of a job (`docs/EPOCHS.md`, "Loaders").
//!
//! A process names itself in its requests, so that the server can tell two processes of one rank apart.

use serde::{Deserialize, Serialize};
use std::{
    fmt,
    time::{Duration, UNIX_EPOCH},
};
use utoipa::ToSchema;

/// The length of a loader's id, in hexadecimal digits.
pub const LOADER_ID_DIGITS: usize = 32;
/// The longest host name of a loader, in bytes.
pub const LOADER_HOST_MAX: usize = 255;
/// The latest start of a loader: the last millisecond of the year 9999, in milliseconds since 1970.
pub const LOADER_SINCE_MAX: u64 = 253_402_300_799_999;
/// The most ranks whose loaders a job or a receipt lists.
pub const LOADERS_LISTED_MAX: usize = 256;

/// A process that reads as a rank of a job, and its workers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Loader {
    /// The id: 32 lower-case hexadecimal digits. The process draws it at random; its workers inherit it.
    pub id: String,
    /// The name of the process's host, 1 to 255 bytes.
    pub host: String,
    /// The number of the process on its host.
    pub pid: u32,
    /// When the process started, in milliseconds since 1970.
    pub since_ms: u64,
    /// Whether to take the rank over at once, even if another loader has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub take_over: bool,
    /// Whether the loader gives the rank up, and its leases with it. Only in requests for acks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leave: bool,
}

impl Loader {
    /// Checks the lengths and characters of the texts.
    ///
    /// # Errors
    /// A sentence about the field that is not valid.
    pub fn check(&self) -> Result<(), String> {
        let is_digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if self.id.len() != LOADER_ID_DIGITS || !self.id.bytes().all(is_digit) {
            return Err(format!("the loader's id is not {LOADER_ID_DIGITS} lower-case hexadecimal digits"));
        }
        if self.host.is_empty() || self.host.len() > LOADER_HOST_MAX {
            return Err(format!("the loader's host name has not 1 to {LOADER_HOST_MAX} bytes"));
        }
        if self.host.chars().any(char::is_control) {
            return Err("the loader's host name contains a control character".to_owned());
        }
        if self.since_ms > LOADER_SINCE_MAX {
            return Err(format!("the loader's start, {} ms, is after the year 9999", self.since_ms));
        }
        Ok(())
    }

    /// Returns the loader without its wishes, for an answer.
    #[must_use]
    pub fn shown(&self) -> Self {
        Loader { take_over: false, leave: false, ..self.clone() }
    }

    /// Returns whether both loaders are of one process.
    #[must_use]
    pub fn is_same_process(&self, other: &Loader) -> bool {
        (self.pid, self.since_ms, &self.host) == (other.pid, other.since_ms, &other.host)
    }
}

impl fmt::Display for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = UNIX_EPOCH + Duration::from_millis(self.since_ms.min(LOADER_SINCE_MAX));
        let since = humantime::format_rfc3339_seconds(since);
        write!(f, "process {} on {} (since {since})", self.pid, self.host)
    }
}

/// The loaders of a job, since the server opened the job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobLoaders {
    /// The ranks that sent requests, in order; at most 256 of them.
    pub ranks: Vec<RankLoader>,
    /// The number of ranks that sent requests.
    pub total: u64,
    /// The number of ranks for which a client without a loader id sent requests.
    pub unnamed: u64,
}

/// The loader that has a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RankLoader {
    /// The rank.
    pub rank: u32,
    /// The current loader. Absent if only clients without an id sent requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loader: Option<Loader>,
    /// The time since the loader last asked, acknowledged or renewed, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent_ms: Option<u64>,
    /// Whether the loader gave the rank up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_left: bool,
    /// The loader that waits for the rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Loader>,
    /// The time since a client without an id sent a request for the rank, in milliseconds.
    ///
    /// The server cannot tell whether such requests come from one process or from several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unnamed_ms: Option<u64>,
}

/// The entries that one loader acknowledged as a rank of an epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AckedBy {
    /// The rank.
    pub rank: u32,
    /// The loader. Absent: clients without an id, and loaders beyond the eighth of the rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loader: Option<Loader>,
    /// The number of entries.
    pub entries: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loader() -> Loader {
        Loader {
            id: "0123456789abcdef0123456789abcdef".into(),
            host: "gpu-7".into(),
            pid: 41,
            since_ms: 1_790_000_000_000,
            take_over: false,
            leave: false,
        }
    }

    #[test]
    fn a_loader_parses_as_documented() {
        let text = concat!(
            r#"{"id":"0123456789abcdef0123456789abcdef","host":"gpu-7","pid":41,"#,
            r#""since_ms":1790000000000}"#
        );
        assert_eq!(serde_json::from_str::<Loader>(text).expect("documented form"), loader());
        assert_eq!(serde_json::to_string(&loader()).expect("json"), text);
        assert!(serde_json::from_str::<Loader>(&text.replace("pid", "process")).is_err());
        let wishes = Loader { take_over: true, leave: true, ..loader() };
        assert_eq!(wishes.shown(), loader());
    }

    #[test]
    fn the_texts_of_a_loader_are_bounded() {
        loader().check().expect("valid");
        let with_id = |id: &str| Loader { id: id.into(), ..loader() }.check();
        let with_host = |host: &str| Loader { host: host.into(), ..loader() }.check();
        for id in ["", "0123", "0123456789ABCDEF0123456789abcdef", "0123456789abcdef0123456789abcdef0"] {
            assert!(with_id(id).is_err(), "{id}");
        }
        for host in ["", "a\nb", &"h".repeat(LOADER_HOST_MAX + 1)] {
            assert!(with_host(host).is_err(), "{host}");
        }
        with_host(&"h".repeat(LOADER_HOST_MAX)).expect("the longest");
    }

    #[test]
    fn a_loader_is_named_to_people() {
        assert_eq!(loader().to_string(), "process 41 on gpu-7 (since 2026-09-21T14:13:20Z)");
        let late = Loader { since_ms: u64::MAX, ..loader() };
        assert!(late.check().is_err());
        assert_eq!(late.to_string(), "process 41 on gpu-7 (since 9999-12-31T23:59:59Z)");
    }

    #[test]
    fn one_process_has_one_host_number_and_start() {
        let again = Loader { id: "f".repeat(32), ..loader() };
        assert!(loader().is_same_process(&again));
        for other in [
            Loader { pid: 42, ..again.clone() },
            Loader { since_ms: 1, ..again.clone() },
            Loader { host: "gpu-8".into(), ..again.clone() },
        ] {
            assert!(!loader().is_same_process(&other), "{other:?}");
        }
    }
}

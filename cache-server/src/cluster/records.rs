//! The keys of a cluster in etcd, and their values as JSON.
//!
//! ```text
//! /fletch/NAME/cluster      {format, uid}                  written once, by the first server
//! /fletch/NAME/recovering   {format, uid}                  while servers write keys back that etcd lost
//! /fletch/NAME/ring         {format, members, before, drained}   its revision is the number of the view
//! /fletch/NAME/members/ID   {format, incarnation, url, …}  under the lease of the member
//! /fletch/NAME/data/datasets/DOMAIN/DATASET   {format, tenant, uri, …, bytes}
//! /fletch/NAME/data/tenants/TENANT            {format}         written with every change of its datasets
//! /fletch/NAME/jobs/declared/ID     {format, group, term, domain, …}   written by the primary of the group
//! /fletch/NAME/jobs/groups/GROUP    {format, term, primary, incarnation}   by compare-and-swap
//! /fletch/NAME/seen/ID      {format, revision}             the latest change that the member executed
//! ```
//! A record with another format is an error, because an older server would misread it.

use fletch_core::{MemberId, cluster::Ring};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::BTreeMap;

/// The format of all records.
const FORMAT: u32 = 1;

/// The protocol of requests between servers. It grows when a server could misread what an older one asks. A
/// server asks no member with another protocol for chunks, so builds with different ones can run together.
pub const PEER_PROTOCOL: u32 = 1;

/// The keys of one cluster.
#[derive(Debug, Clone)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    pub fn new(cluster: &str) -> Self {
        Keys { prefix: format!("/fletch/{cluster}/") }
    }

    pub fn cluster(&self) -> String {
        format!("{}cluster", self.prefix)
    }

    /// Returns the key that marks an etcd into which servers write lost keys back.
    pub fn recovering(&self) -> String {
        format!("{}recovering", self.prefix)
    }

    pub fn ring(&self) -> String {
        format!("{}ring", self.prefix)
    }

    pub fn member(&self, id: &MemberId) -> String {
        format!("{}{id}", self.members())
    }

    /// Returns the prefix of the keys of all members.
    pub fn members(&self) -> String {
        format!("{}members/", self.prefix)
    }

    /// Returns the prefix of everything that all members execute.
    pub fn data(&self) -> String {
        format!("{}data/", self.prefix)
    }

    /// Returns the prefix of the keys in which members claim that they know later datasets than etcd.
    pub fn claims(&self) -> String {
        format!("{}claims/", self.prefix)
    }

    /// Returns the prefix of everything about jobs.
    pub fn jobs(&self) -> String {
        format!("{}jobs/", self.prefix)
    }

    /// Returns the prefix of the keys that say what members have executed.
    pub fn all_seen(&self) -> String {
        format!("{}seen/", self.prefix)
    }

    pub fn seen(&self, id: &MemberId) -> String {
        format!("{}{id}", self.all_seen())
    }
}

/// What tells two clusters of one name apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRecord {
    /// A random number in hexadecimal.
    pub uid: String,
}

/// What a member does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberPhase {
    /// It serves.
    Up,
    /// It stopped in good order, and is expected back.
    Restarting,
}

/// What a member says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    /// A random number of its state directory, in hexadecimal.
    pub incarnation: String,
    /// The URL by which clients reach it.
    pub url: String,
    /// The URL by which other servers reach it, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_url: Option<String>,
    /// Where it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// The version of its program.
    pub build: String,
    /// What it does.
    pub phase: MemberPhase,
    /// The protocol that it speaks with other servers, [`PEER_PROTOCOL`] of its build.
    #[serde(default = "first_peer_protocol")]
    pub peer_protocol: u32,
    /// A random number of its process, in hexadecimal. Empty in records of older builds.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub process: String,
    /// A hash of the machine and the directory where its state lies. Empty if that is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub place: String,
    /// Whether it asks for tokens. Absent in records of older builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs_token: Option<bool>,
}

impl MemberRecord {
    /// Whether this is the record of another process with a copy of the same state directory.
    #[must_use]
    pub fn is_twin_of(&self, own: &MemberRecord) -> bool {
        let is_same = self.incarnation == own.incarnation && self.phase == MemberPhase::Up;
        is_same && !self.process.is_empty() && self.process != own.process
    }
}

fn first_peer_protocol() -> u32 {
    1
}

/// A value of etcd, and the revision that wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keyed<T> {
    /// The revision of its last change. 0 where the key does not exist.
    pub revision: u64,
    pub value: T,
}

/// All keys of a cluster at one revision of etcd.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// The record of the cluster.
    pub cluster: Option<ClusterRecord>,
    /// The ring, empty before the first server joins.
    pub ring: Keyed<Ring>,
    /// The members that have a key.
    pub members: BTreeMap<MemberId, Keyed<MemberRecord>>,
}

impl<T: Default> Default for Keyed<T> {
    fn default() -> Self {
        Keyed { revision: 0, value: T::default() }
    }
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    format: u32,
    #[serde(flatten)]
    value: T,
}

/// Returns the text of a record.
pub fn to_text<T: Serialize>(value: &T) -> Vec<u8> {
    // Records are texts, numbers and lists, which always serialize.
    serde_json::to_vec(&Versioned { format: FORMAT, value }).unwrap_or_default()
}

/// Reads a record.
///
/// # Errors
/// A text that says what is wrong with the value.
pub fn from_text<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let format = serde_json::from_slice::<Format>(text).map_err(|e| e.to_string())?.format;
    if format != FORMAT {
        return Err(format!("it has format {format}; this server knows format {FORMAT}"));
    }
    serde_json::from_slice::<Versioned<T>>(text).map(|v| v.value).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_fixed_texts() {
        let id = MemberId::new("srv-1").expect("a name");
        let keys = Keys::new("prod");
        assert_eq!(keys.member(&id), "/fletch/prod/members/srv-1");
        let record = MemberRecord {
            incarnation: "00ff".into(),
            url: "http://10.0.0.1:7380".into(),
            peer_url: None,
            zone: Some("a".into()),
            build: "0.1.0".into(),
            peer_protocol: PEER_PROTOCOL,
            phase: MemberPhase::Restarting,
            process: String::new(),
            place: String::new(),
            needs_token: None,
        };
        let text = String::from_utf8(to_text(&record)).expect("UTF-8");
        assert_eq!(
            text,
            concat!(
                r#"{"format":1,"incarnation":"00ff","url":"http://10.0.0.1:7380","zone":"a","#,
                r#""build":"0.1.0","phase":"restarting","peer_protocol":1}"#
            )
        );
        assert_eq!(from_text::<MemberRecord>(text.as_bytes()), Ok(record.clone()));
        let named =
            MemberRecord { process: "7".into(), place: "9".into(), needs_token: Some(true), ..record };
        let text = String::from_utf8(to_text(&named)).expect("UTF-8");
        assert!(
            text.ends_with(r#""peer_protocol":1,"process":"7","place":"9","needs_token":true}"#),
            "{text}"
        );
        let ring =
            r#"{"format":1,"members":[{"id":"b","url":"u","weight":7},{"id":"a","url":"v","weight":1}]}"#;
        assert_eq!(from_text::<Ring>(ring.as_bytes()).expect("a ring").members()[0].id.as_str(), "a");
        let newer = ring.replace("\"format\":1", "\"format\":2");
        assert!(from_text::<Ring>(newer.as_bytes()).expect_err("newer").contains("format 2"));
        assert!(from_text::<Ring>(b"no JSON").is_err());
    }
}

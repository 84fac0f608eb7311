//! The keys of jobs and groups in etcd, and their values.

use crate::{
    cluster::{KeyValue, Keys, from_text, to_text},
    training::jobs::Record,
};
use fletch_api::OrderKind;
use fletch_core::{Domain, Hash, LayoutId, MemberId, Root, StoreKey};
use serde::{Deserialize, Serialize};

/// The server that has a group of jobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRecord {
    /// Counts the servers that have had the group, from 1.
    pub term: u64,
    /// The server.
    pub primary: MemberId,
    /// The random number of its state directory.
    pub incarnation: String,
}

/// A declared job, without the parts of its declaration that may be long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The group whose primary has the job.
    pub group: String,
    /// The term of the group in which the job got its ledgers. In a later term the ledgers are elsewhere.
    pub term: u64,
    /// Whether parts of the declaration are missing.
    pub is_long: bool,
    /// The declaration, and what its names resolved to.
    #[serde(flatten)]
    pub record: Record,
}

/// What a key is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobKey {
    /// A job, by its id.
    Job(String),
    Group(String),
    /// The key of a newer build.
    Unknown,
}

/// Returns the group of a new job: the jobs that share a sweep, or the job alone. The number at the end
/// leaves room for several sweeps over one version.
pub fn group_of(id: &str, domain: &Domain, order: OrderKind, root: Root, layout: LayoutId) -> String {
    match order {
        OrderKind::Substitute => {
            let hash = Hash::of(format!("{domain}\0{root}\0{layout}").as_bytes()).to_string();
            format!("sweep-{}.0", &hash[..24])
        }
        OrderKind::Strict | OrderKind::Bucketed | OrderKind::Replay => single_group(id),
    }
}

/// Returns the group that has one job only.
pub fn single_group(id: &str) -> String {
    format!("job-{id}")
}

/// Returns the key by which members are ranked for a group.
pub fn ranking_key(domain: &Domain, group: &str) -> StoreKey {
    StoreKey { domain: domain.clone(), hash: Hash::of(group.as_bytes()) }
}

pub fn job_key(keys: &Keys, id: &str) -> String {
    format!("{}declared/{id}", keys.jobs())
}

pub fn group_key(keys: &Keys, group: &str) -> String {
    format!("{}groups/{group}", keys.jobs())
}

pub fn parse_key(keys: &Keys, key: &[u8]) -> JobKey {
    let key = String::from_utf8_lossy(key);
    let parts: Vec<&str> = key.strip_prefix(&keys.jobs()).unwrap_or_default().split('/').collect();
    match parts[..] {
        ["declared", id] => JobKey::Job(id.to_owned()),
        ["groups", group] => JobKey::Group(group.to_owned()),
        _ => JobKey::Unknown,
    }
}

/// Reads the record of a job.
///
/// # Errors
/// What is wrong with it, also for a record of another job than its key says.
pub fn read_job(kv: &KeyValue, id: &str) -> Result<JobRecord, String> {
    let read: JobRecord = from_text(&kv.value)?;
    if read.record.id() == id { Ok(read) } else { Err("it is the record of another job".to_owned()) }
}

pub fn job_text(job: &JobRecord) -> Vec<u8> {
    to_text(job)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::StartJob;

    #[test]
    fn records_have_fixed_texts() {
        let keys = Keys::new("prod");
        assert_eq!(job_key(&keys, "0a"), "/fletch/prod/jobs/declared/0a");
        assert_eq!(group_key(&keys, "job-0a"), "/fletch/prod/jobs/groups/job-0a");
        for (key, want) in [
            (job_key(&keys, "0a"), JobKey::Job("0a".into())),
            (group_key(&keys, "g.0"), JobKey::Group("g.0".into())),
            ("/fletch/prod/jobs/other/0a".into(), JobKey::Unknown),
            ("/fletch/prod/jobs/groups/a/b".into(), JobKey::Unknown),
            ("/other".into(), JobKey::Unknown),
        ] {
            assert_eq!(parse_key(&keys, key.as_bytes()), want, "{key}");
        }
        let primary = MemberId::new("srv-1").expect("a name");
        let text = to_text(&GroupRecord { term: 2, primary, incarnation: "00ff".into() });
        assert_eq!(
            String::from_utf8_lossy(&text),
            r#"{"format":1,"term":2,"primary":"srv-1","incarnation":"00ff"}"#
        );
        let ask: StartJob = serde_json::from_str(concat!(
            r#"{"name":"run","dataset":"set","seed":18446744073709551615,"#,
            r#""world":{"ranks":1,"batch":8,"tail":"drop"}}"#
        ))
        .expect("JSON");
        let record = Record {
            domain: Domain::new("a").expect("name"),
            tenant: fletch_core::Tenant::new("t").expect("name"),
            dataset: ask.dataset.clone().expect("named"),
            ask,
            root: "7".repeat(64).parse().expect("a root"),
            layout: "8".repeat(64).parse().expect("a layout"),
        };
        let (id, group) = (record.id(), "sweep-1.0".to_owned());
        let job = JobRecord { group, term: 1, is_long: false, record };
        let kv = KeyValue { key: Vec::new(), value: job_text(&job), mod_revision: 3 };
        assert_eq!(read_job(&kv, &id), Ok(job));
        assert!(read_job(&kv, "0a").is_err());
    }

    #[test]
    fn jobs_of_one_version_share_a_group_if_they_share_a_sweep() {
        let domain = Domain::new("a").expect("name");
        let (root, layout): (Root, LayoutId) =
            ("7".repeat(64).parse().expect("a root"), "8".repeat(64).parse().expect("a layout"));
        let group = |id: &str, order| group_of(id, &domain, order, root, layout);
        assert_eq!(group("1", OrderKind::Substitute), group("2", OrderKind::Substitute));
        assert!(group("1", OrderKind::Substitute).ends_with(".0"));
        assert_eq!(group("1", OrderKind::Strict), "job-1");
    }
}

//! Jobs: what an epoch delivers, to which ranks, and in which order (`docs/EPOCHS.md`).

use crate::allocation::{JobSettings, JobShare};
use crate::benefit::JobBenefit;
use crate::dashboard::JobDoing;
use crate::epochs::Epoch;
use crate::loaders::JobLoaders;
use crate::world::WorldSpec;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use fletch_core::{DatasetName, Hash, JobName, LayoutId, Root};
use serde::{Deserialize, Serialize};
use std::{fmt, sync::Arc};
use utoipa::ToSchema;

/// The longest body of `POST /v1/jobs`, in bytes. Large, because a plan may be a list of samples.
pub const JOB_BODY_BYTES_MAX: usize = 64 << 20;

/// Body of `POST /v1/jobs`.
///
/// Declaring the same name with the same settings returns the same job. Other settings are rejected.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartJob {
    /// The name of the job, unique in its tenant.
    #[schema(value_type = String)]
    pub name: JobName,
    /// The dataset to read. Absent if `root` names the version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub dataset: Option<DatasetName>,
    /// A tag or a root of the dataset, resolved once when the job is declared. The default is `latest`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The root of the version, if no dataset is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub root: Option<Root>,
    /// The layout to read the version by. The default is the layout that the server gives to readers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub layout: Option<LayoutId>,
    /// The seed of every random choice.
    ///
    /// The default is the seed of the replayed ledger or, without a replay, the first eight bytes of the
    /// BLAKE3 hash of the name, as a little-endian number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// The order in which samples are delivered.
    #[serde(default)]
    pub order: OrderKind,
    /// The samples that an epoch delivers.
    #[serde(default)]
    pub plan: PlanSpec,
    /// The buckets of the order `bucketed`, or of a `replay` of such an epoch. Absent with other orders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buckets: Option<BucketSpec>,
    /// The epoch that the order `replay` repeats. Absent with other orders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<ReplaySpec>,
    /// The ranks that share each step.
    pub world: WorldSpec,
    /// When a sample counts as delivered.
    #[serde(default)]
    pub visitation: Visitation,
}

/// Returns the default seed of a job: the first eight bytes of the BLAKE3 hash of its name, little-endian.
#[must_use]
pub fn default_seed(name: &JobName) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&Hash::of(name.as_str().as_bytes()).as_bytes()[..8]);
    u64::from_le_bytes(first)
}

/// The order in which samples are delivered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OrderKind {
    /// The cache chooses among the samples that were not delivered yet, and prefers cached ones.
    #[default]
    Substitute,
    /// A keyed permutation that is fixed in advance.
    Strict,
    /// A keyed permutation in which all entries of a step, over all ranks, belong to one bucket.
    Bucketed,
    /// The order of a ledger: each rank gets the samples that it acknowledged then, in the same order.
    Replay,
}

impl OrderKind {
    /// Returns the word that JSON and ledgers use.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            OrderKind::Substitute => "substitute",
            OrderKind::Strict => "strict",
            OrderKind::Bucketed => "bucketed",
            OrderKind::Replay => "replay",
        }
    }
}

/// When a sample counts as delivered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Visitation {
    /// When it is acknowledged. A sample that was granted and not acknowledged is delivered again.
    #[default]
    ExactlyOnce,
    /// When it is granted. It is never delivered again.
    AtMostOnce,
    /// When it is acknowledged, and for good when a checkpoint of the model commits it.
    ///
    /// Rolling back to a checkpoint delivers again the samples that were acknowledged after it.
    Checkpoint,
}

/// The multiset of samples that an epoch delivers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanSpec {
    /// The samples.
    #[serde(default)]
    pub base: PlanBase,
    /// How often each sample is repeated, and how far apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub echo: Option<EchoSpec>,
}

/// The samples of a plan: `"all"`, `{"samples": [0, 5]}`, `{"keys": ["n01/7"]}` or `{"weights": {…}}`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PlanBase {
    /// Every sample once.
    #[default]
    All,
    /// These samples, by number. Each is delivered once, even if it is named more often.
    Samples(Vec<u64>),
    /// These samples, by key, each once. The key of a sample that is one file is its path.
    Keys(Vec<String>),
    /// `draws` samples, in proportion to their weights.
    Weights(Weights),
}

/// The weights of samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// One weight for each sample of the version, or for each sample of `of`. Finite and at least 0.
    ///
    /// `null` stands for NaN, which JSON cannot express, and is rejected.
    pub weights: Vec<Option<f64>>,
    /// The number of entries that an epoch delivers.
    pub draws: u64,
    /// The samples that the weights belong to, each named once. All other samples have the weight 0.
    ///
    /// The default is all samples of the version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<WeightOf>,
}

/// The samples that weights belong to: `{"samples": [0, 5]}` or `{"keys": ["n01/7"]}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WeightOf {
    /// Samples by number.
    Samples(Vec<u64>),
    /// Samples by key.
    Keys(Vec<String>),
}

/// Data echoing: repeats each sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EchoSpec {
    /// How often each sample is delivered.
    pub copies: u32,
    /// The least number of positions between two copies of a sample, also across restarts.
    ///
    /// A state does not record the order of its entries. After a state was loaded in the last steps of an
    /// epoch, copies may be closer.
    #[serde(default)]
    pub apart: u32,
}

/// The most prefixes of a [`BucketSpec`].
pub const PREFIXES_MAX: usize = 1024;

/// How samples are sorted into buckets.
///
/// One of `{"lengths": [1000, 4000]}`, `{"prefixes": ["de/", "fr/"]}` and `{"groups": [0, 2, 0]}`. The number
/// of a bucket is below 65,536.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BucketSpec {
    /// Bounds in bytes, ascending. A sample is in bucket i if i of the bounds are at most its length.
    ///
    /// The length of a sample is the sum over its files.
    Lengths(Vec<u64>),
    /// Key prefixes, at most 1,024. A sample is in the bucket of the first prefix that its key begins with.
    ///
    /// The key of a sample that is one file is its path. Samples without a matching prefix share one more
    /// bucket.
    Prefixes(Vec<String>),
    /// The bucket of each sample of the version, in the order of the sample numbers.
    Groups(Vec<u32>),
}

/// The epoch that a replay repeats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplaySpec {
    /// The ledger, as `GET …/ledger` returned it. Base64 in JSON.
    #[schema(value_type = String)]
    pub ledger: LedgerBytes,
}

/// The bytes of a ledger. Cheap to clone. In JSON, base64 with the standard alphabet and padding.
#[derive(Clone, PartialEq, Eq)]
pub struct LedgerBytes(pub Arc<[u8]>);

impl fmt::Debug for LedgerBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Serialize for LedgerBytes {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for LedgerBytes {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let bytes = STANDARD
            .decode(text)
            .map_err(|e| serde::de::Error::custom(format!("the ledger is not valid base64: {e}")))?;
        Ok(LedgerBytes(bytes.into()))
    }
}

/// A job with its settings and its epochs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// The id of the job, as in its routes.
    pub id: String,
    /// The name of the job.
    #[schema(value_type = String)]
    pub name: JobName,
    /// The dataset that the job reads.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// The root of the version.
    #[schema(value_type = String)]
    pub root: Root,
    /// The layout of the version.
    #[schema(value_type = String)]
    pub layout: LayoutId,
    /// The seed of every random choice.
    pub seed: u64,
    /// The order in which samples are delivered.
    pub order: OrderKind,
    /// When a sample counts as delivered.
    pub visitation: Visitation,
    /// The ranks that share each step now.
    pub world: WorldSpec,
    /// The hash of the plan and its buckets.
    ///
    /// A weighted plan is drawn once, from the seed, so it is the same in every epoch.
    #[schema(value_type = String)]
    pub plan: Hash,
    /// The number of samples of the version.
    pub samples: u64,
    /// The number of entries of the plan.
    pub entries: u64,
    /// The number of steps of an epoch in this world.
    pub steps: u64,
    /// The epochs that the server remembers, in order.
    pub epochs: Vec<Epoch>,
    /// The sweep that gives the job its samples. Absent with other orders than `substitute`, and while the
    /// disk has no share for sweeps, as with the cache policies `lru` and `pin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sweep: Option<JobSweep>,
    /// What cache is worth to the job. Absent in the answers of older servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub benefit: Option<JobBenefit>,
    /// What the job does now. Absent in the answers of older servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doing: Option<JobDoing>,
    /// What users set of the job.
    #[serde(default)]
    pub settings: JobSettings,
    /// What the job has of the disk, and why. Absent while the job does not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<JobShare>,
    /// The processes that read as its ranks. Absent in the answers of older servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loaders: Option<JobLoaders>,
    /// Where its reads waited on this server, since it was last idle; the longest wait first. Reads that run
    /// at once count each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<GateWait>,
    /// Whether the server that has the job is away. Then only what was declared is known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_away: bool,
}

/// How long the reads of a job waited at one gate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GateWait {
    /// The gate: a label of the metric `fletch_read_wait_seconds`.
    pub gate: String,
    /// Seconds.
    pub seconds: f64,
}

/// Fewer units than these share almost nothing between jobs, unless they are all.
pub const SWEEP_UNITS_MIN: u64 = 5;

/// How much of a version the sweep of a job can hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobSweep {
    /// What the sweep may keep now, in bytes as they occupy the disk.
    pub capacity_bytes: u64,
    /// What all units of the version occupy.
    pub total_bytes: u64,
    /// The mean size of a unit, in the same bytes. A unit is a chunk, mostly.
    pub unit_bytes: u64,
}

impl JobSweep {
    /// Returns how many units of mean size the sweep can hold.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.capacity_bytes.checked_div(self.unit_bytes).unwrap_or(0)
    }

    /// Returns whether the sweep is too small to share: below five chunks, and not the whole version.
    ///
    /// A version that has fewer than five chunks itself is never too small for its sweep.
    #[must_use]
    pub fn is_too_small(&self) -> bool {
        let all = self.total_bytes.checked_div(self.unit_bytes).unwrap_or(0);
        self.capacity_bytes < self.total_bytes && self.units() < SWEEP_UNITS_MIN && all >= SWEEP_UNITS_MIN
    }

    /// Returns a sentence for people about a sweep that is too small.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        self.is_too_small().then(|| {
            format!(
                "the sweep holds {} chunks of {} bytes, and below {SWEEP_UNITS_MIN} it shares almost \
                 nothing; give the cache more space, or pack the dataset with smaller chunks",
                self.units(),
                self.unit_bytes
            )
        })
    }
}

/// The jobs of the caller's tenant.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobList {
    /// The jobs in the order of their names, without their epochs.
    pub jobs: Vec<JobLine>,
    /// The jobs of the cluster whose server is away, in the order of their names. Every server lists them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<WaitingJob>,
}

/// A job that the cluster knows, and that no server serves now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitingJob {
    /// The id of the job, as in its routes.
    pub id: String,
    /// The name of the job.
    #[schema(value_type = String)]
    pub name: JobName,
    /// The dataset that it reads.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// The root of the version that it reads.
    #[schema(value_type = String)]
    pub root: Root,
    /// The name of the server that had it last.
    pub server: String,
    /// Whether that server is down or has lost its state directory. Else it is restarting.
    pub is_gone: bool,
    /// The ranks that have not said yet what they consumed, if others have. The job goes on after that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<u32>,
}

impl WaitingJob {
    /// Returns what the job waits for.
    #[must_use]
    pub fn words(&self) -> String {
        if !self.waits_for.is_empty() {
            let ranks: Vec<String> = self.waits_for.iter().map(u32::to_string).collect();
            return match &ranks[..] {
                [rank] => format!("waits until rank {rank} says what it consumed"),
                _ => format!("waits until ranks {} say what they consumed", ranks.join(", ")),
            };
        }
        let state =
            if self.is_gone { "which is down or has lost its state directory" } else { "which restarts" };
        format!("waits for {}, {state}", self.server)
    }
}

/// A job in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobLine {
    /// The id of the job, as in its routes.
    pub id: String,
    /// The name of the job.
    #[schema(value_type = String)]
    pub name: JobName,
    /// The dataset that the job reads.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// The root of the version.
    #[schema(value_type = String)]
    pub root: Root,
    /// The latest epoch. Absent while the job is not open: no request came for `limits.job_ttl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<Epoch>,
    /// The sweep that gives the job its samples. Absent as in [`Job::sweep`], and while the job is not open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sweep: Option<JobSweep>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_core::plan::Tail;

    #[test]
    fn jobs_parse_as_documented() {
        let text = concat!(
            r#"{"name":"train-7","dataset":"images","plan":{"base":{"keys":["a/1"]},"echo":{"copies":2}},"#,
            r#""world":{"ranks":2,"batch":8,"tail":"drop"}}"#
        );
        let job: StartJob = serde_json::from_str(text).expect("documented form");
        assert_eq!((job.order, job.visitation), (OrderKind::Substitute, Visitation::ExactlyOnce));
        assert_eq!(job.plan.base, PlanBase::Keys(vec!["a/1".into()]));
        assert_eq!(job.plan.echo, Some(EchoSpec { copies: 2, apart: 0 }));
        assert_eq!(job.world, WorldSpec { ranks: 2, batch: 8, tail: Tail::Drop });
        let back = serde_json::to_string(&job).expect("json");
        assert_eq!(serde_json::from_str::<StartJob>(&back).expect("json"), job);
        let all: PlanSpec = serde_json::from_str(r#"{"base":"all"}"#).expect("documented form");
        assert_eq!(all, PlanSpec::default());
        let text_of = |b: &BucketSpec| serde_json::to_string(b).expect("json");
        assert_eq!(text_of(&BucketSpec::Lengths(vec![10])), r#"{"lengths":[10]}"#);
        assert_eq!(text_of(&BucketSpec::Prefixes(vec!["de/".into()])), r#"{"prefixes":["de/"]}"#);
        assert_eq!(text_of(&BucketSpec::Groups(vec![0, 2])), r#"{"groups":[0,2]}"#);
        let replay = ReplaySpec { ledger: LedgerBytes(Arc::from(&b"led\xff"[..])) };
        let json = serde_json::to_string(&replay).expect("json");
        assert_eq!(json, r#"{"ledger":"bGVk/w=="}"#);
        assert_eq!(serde_json::from_str::<ReplaySpec>(&json).expect("json"), replay);
        assert!(serde_json::from_str::<ReplaySpec>(r#"{"ledger":"bGVk/w"}"#).is_err());
        let w: PlanBase =
            serde_json::from_str(r#"{"weights":{"weights":[1,null,0.5],"draws":3}}"#).expect("form");
        assert_eq!(
            w,
            PlanBase::Weights(Weights { weights: vec![Some(1.0), None, Some(0.5)], draws: 3, of: None })
        );
        for bad in [
            text.replace("\"batch\":8,", ""),
            text.replace("\"name\"", "\"nome\""),
            text.replace("drop", "cut"),
        ] {
            assert!(serde_json::from_str::<StartJob>(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_jobs_default_seed_never_changes() {
        let name = JobName::new("train-7").expect("name");
        assert_eq!(default_seed(&name), 11_142_698_902_253_167_184);
    }
}

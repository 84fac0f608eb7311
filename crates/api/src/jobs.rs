//! Declared jobs: what is delivered, to whom, and in which order (`docs/EPOCHS.md`).

use crate::epochs::Epoch;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use fletch_core::{DatasetName, Hash, JobName, LayoutId, Root, plan::Tail};
use serde::{Deserialize, Serialize};
use std::{fmt, sync::Arc};
use utoipa::ToSchema;

/// No body of `POST /v1/jobs` is longer, in bytes: a plan may be a list.
pub const JOB_BODY_BYTES_MAX: usize = 64 << 20;

/// Body of `POST /v1/jobs`. The same name with the same settings is the same job; with others it is refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartJob {
    /// Its name, unique in its tenant.
    #[schema(value_type = String)]
    pub name: JobName,
    /// The dataset to read; absent when `root` says which version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub dataset: Option<DatasetName>,
    /// A tag or a root of the dataset, resolved once when the job begins; `latest` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The version, where no dataset is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub root: Option<Root>,
    /// The layout to read it by; the one that readers are given when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub layout: Option<LayoutId>,
    /// Where every random choice begins; when absent, the first eight bytes of the name's BLAKE3, little-endian, or that of the ledger that is
    /// replayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Who decides the order.
    #[serde(default)]
    pub order: OrderKind,
    /// What an epoch delivers.
    #[serde(default)]
    pub plan: PlanSpec,
    /// What makes the buckets of an order `bucketed`, and of a `replay` of such a ledger; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buckets: Option<BucketSpec>,
    /// What an order `replay` replays; absent with other orders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<ReplaySpec>,
    /// Who shares a step.
    pub world: WorldSpec,
    /// What counts as delivered.
    #[serde(default)]
    pub visitation: Visitation,
}

/// The seed of a job that names none: the first eight bytes of the BLAKE3 of its name, as a
/// little-endian number.
#[must_use]
pub fn default_seed(name: &JobName) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&Hash::of(name.as_str().as_bytes()).as_bytes()[..8]);
    u64::from_le_bytes(first)
}

/// Who decides which sample comes next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OrderKind {
    /// The cache: any sample that was not delivered yet will do.
    #[default]
    Substitute,
    /// A keyed permutation, known in advance.
    Strict,
    /// A keyed permutation in which all entries of a step, of all ranks together, are of one bucket.
    Bucketed,
    /// A ledger: each rank gets again what it acknowledged then, in that order.
    Replay,
}

impl OrderKind {
    /// The word in JSON and in ledgers.
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
    /// When it was acknowledged; what was granted and not acknowledged is delivered again.
    #[default]
    ExactlyOnce,
    /// When it was granted; whatever becomes of it, it is not delivered again.
    AtMostOnce,
    /// When it was acknowledged, and for good when a checkpoint of the model has it: going back to one delivers what came
    /// after it again.
    Checkpoint,
}

/// The multiset of samples that an epoch delivers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanSpec {
    /// Which samples.
    #[serde(default)]
    pub base: PlanBase,
    /// How often each, and how far apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub echo: Option<EchoSpec>,
}

/// Which samples: `"all"`, `{"samples": [0, 5]}`, `{"keys": ["n01/7"]}` or `{"weights": {…}}`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PlanBase {
    /// Every sample once.
    #[default]
    All,
    /// These, by number, once each however often they are named.
    Samples(Vec<u64>),
    /// These, by key (the path of a sample that is one file), once each.
    Keys(Vec<String>),
    /// As many as `draws`, in proportion to weights.
    Weights(Weights),
}

/// Weights of samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// One weight for each sample of the version, or for each of `of`; finite and at least 0. JSON has no NaN: `null` stands for one, and is refused.
    pub weights: Vec<Option<f64>>,
    /// Entries of one pass.
    pub draws: u64,
    /// Whose weights these are, each once; all others weigh nothing. All samples of the version when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<WeightOf>,
}

/// Whose weights: `{"samples": [0, 5]}` or `{"keys": ["n01/7"]}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WeightOf {
    /// By number.
    Samples(Vec<u64>),
    /// By key.
    Keys(Vec<String>),
}

/// Data echoing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EchoSpec {
    /// How often each entry is delivered.
    pub copies: u32,
    /// The next copy of an entry comes at least this many positions after it, also over restarts. A state does not say in which
    /// order its entries were delivered: over one that is loaded in the last steps of an epoch a copy may be nearer.
    #[serde(default)]
    pub apart: u32,
}

/// No more prefixes make buckets.
pub const PREFIXES_MAX: usize = 1024;

/// What makes buckets: `{"lengths": [1000, 4000]}`, `{"prefixes": ["de/", "fr/"]}` or `{"groups": [0, 2, 0]}`. A
/// bucket's number is below 65,536.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BucketSpec {
    /// Ascending bounds in bytes: a sample, all its files together, is in bucket i when i bounds are at most its length.
    Lengths(Vec<u64>),
    /// A sample is in the bucket of the first prefix that its key (the path of a sample that is one file) begins
    /// with; those without one are in a further bucket. At most 1,024.
    Prefixes(Vec<String>),
    /// The bucket of each sample of the version, by number.
    Groups(Vec<u32>),
}

/// An epoch to deliver again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplaySpec {
    /// The ledger, as `GET …/ledger` gave it; base64 in JSON.
    #[schema(value_type = String)]
    pub ledger: LedgerBytes,
}

/// The bytes of a ledger, cheap to clone; in JSON base64, of the standard alphabet and padded.
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
        let bytes = STANDARD.decode(text).map_err(|e| serde::de::Error::custom(format!("no base64: {e}")))?;
        Ok(LedgerBytes(bytes.into()))
    }
}

/// Who shares a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WorldSpec {
    /// Data-parallel consumers.
    pub ranks: u32,
    /// Entries a step of all ranks together; a multiple of `ranks`.
    pub batch: u32,
    /// What becomes of a last step that is not whole: `keep` (one rank only), `drop` or `pad`.
    #[schema(value_type = String)]
    pub tail: Tail,
}

/// A job as it is now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// What its routes call it.
    pub id: String,
    /// Its name.
    #[schema(value_type = String)]
    pub name: JobName,
    /// The dataset it reads through.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// The version.
    #[schema(value_type = String)]
    pub root: Root,
    /// The layout.
    #[schema(value_type = String)]
    pub layout: LayoutId,
    /// Where every random choice begins.
    pub seed: u64,
    /// Who decides the order.
    pub order: OrderKind,
    /// When a sample counts as delivered.
    pub visitation: Visitation,
    /// Who shares a step now.
    pub world: WorldSpec,
    /// The plan's hash, with its buckets if it has any. A weighted plan is drawn from the seed, the same in every epoch.
    #[schema(value_type = String)]
    pub plan: Hash,
    /// Samples of the version.
    pub samples: u64,
    /// Entries of the plan.
    pub entries: u64,
    /// Steps of an epoch in this world.
    pub steps: u64,
    /// Its epochs that are remembered, in order.
    pub epochs: Vec<Epoch>,
}

/// Jobs of the asking principal's tenant, by name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobList {
    /// The jobs, each without its epochs.
    pub jobs: Vec<JobLine>,
}

/// A job in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobLine {
    /// What its routes call it.
    pub id: String,
    /// Its name.
    #[schema(value_type = String)]
    pub name: JobName,
    /// The dataset it reads through.
    #[schema(value_type = String)]
    pub dataset: DatasetName,
    /// The version.
    #[schema(value_type = String)]
    pub root: Root,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_read_as_documented() {
        let text = r#"{"name":"train-7","dataset":"images","plan":{"base":{"keys":["a/1"]},"echo":{"copies":2}},"world":{"ranks":2,"batch":8,"tail":"drop"}}"#;
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

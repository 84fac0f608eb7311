//! `fletch receipt`: shows the receipt of an epoch, and checks consumption logs against it.
//!
//! `docs/EPOCHS.md`, "Receipts", says what a receipt proves.

use super::{Context, jobs};
use crate::out::count;
use crate::{
    cli::{Proof, ReceiptCommand},
    failure::{Exit, Failure},
};
use fletch_api::{AckedBy, EpochReceipt, UnknownRanks, loaders::LOADERS_LISTED_MAX};
use fletch_core::{
    Hash,
    delivery::{
        Event, Ledger,
        consumption_log::{Check, ConsumptionLog, Discrepancy, LogPosition},
        receipt::{Delivery, LtHash, Receipt, content},
    },
    manifest::SampleRef,
    plan::{Plan, Tail},
};
use fletch_tables::{PartCache, Version};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

/// The most differences that are listed. The rest is only counted.
const LISTED_MAX: usize = 1000;

pub fn run(ctx: &Context, what: ReceiptCommand) -> Result<Exit, Failure> {
    match what {
        ReceiptCommand::Show { job, epoch } => show(ctx, &job, epoch).map(|()| Exit::Ok),
        ReceiptCommand::Verify { files, proof } => verify(ctx, &files, &proof),
    }
}

fn show(ctx: &Context, job: &str, epoch: u64) -> Result<(), Failure> {
    let client = ctx.client()?;
    let said: EpochReceipt =
        ctx.rt.block_on(async { Ok::<_, Failure>(jobs::find(&client, job).await?.receipt(epoch).await?) })?;
    let (r, c) = (&said.receipt, &said.certificate);
    ctx.out.result(&said, |w| {
        writeln!(w, "root\t{}\nplan\t{}\nseed\t{}\nepoch\t{}", r.root, r.plan, r.seed, r.epoch)?;
        writeln!(w, "delivered\t{}\nredelivered\t{}", r.delivered, r.redelivered)?;
        writeln!(w, "dropped\t{}\npadded\t{}", r.dropped.len(), r.padded)?;
        writeln!(w, "value\t{}", r.value.digest())?;
        writeln!(w, "near\t{:.3}\nnear10\t{:.3}", c.near, c.near10)?;
        writeln!(w, "shuffle\t{}", if c.poor { "poor" } else { "well" })?;
        for UnknownRanks { term, ranks, .. } in &said.unknown {
            let ranks = ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            writeln!(w, "unknown\tterm {term}, ranks {ranks}")?;
        }
        Ok(())
    })
}

/// The receipt that the consumption logs are compared with, and what explains a difference.
struct Evidence {
    receipt: Receipt,
    acked_by: Vec<AckedBy>,
    ledger: Option<Ledger>,
    version: Option<Version>,
}

/// A saved receipt: the whole answer of the server, or only its receipt.
#[derive(Deserialize)]
#[serde(untagged)]
enum Saved {
    Answer(Box<EpochReceipt>),
    Bare(Box<Receipt>),
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|e| Failure::io(path.display(), &e))
}

fn ledger_of(bytes: &[u8]) -> Result<Ledger, Failure> {
    Ledger::read(bytes).map_err(|e| Failure::new(format!("cannot read the ledger: {e}")))
}

impl Evidence {
    fn saved(ctx: &Context, path: &Path, proof: &Proof) -> Result<Self, Failure> {
        let (receipt, acked_by) = match serde_json::from_slice(&read(path)?) {
            Ok(Saved::Answer(answer)) => (answer.receipt, answer.acked_by),
            Ok(Saved::Bare(receipt)) => (*receipt, Vec::new()),
            Err(e) => return Err(Failure::new(format!("{} is not a receipt: {e}", path.display()))),
        };
        let ledger = proof.ledger.as_deref().map(|p| ledger_of(&read(p)?)).transpose()?;
        let version = proof.dataset.as_ref().map(|t| ctx.open(t)).transpose()?.map(|o| o.version);
        if let Some(other) = version.as_ref().filter(|v| v.root() != receipt.root) {
            let what =
                format!("the dataset is version {}, but the receipt is of {}", other.root(), receipt.root);
            return Err(Failure::new(what));
        }
        Ok(Evidence { receipt, acked_by, ledger, version })
    }

    fn served(ctx: &Context, name: &str, epoch: u64) -> Result<Self, Failure> {
        let client = ctx.client()?;
        ctx.rt.block_on(async {
            let job = jobs::find(&client, name).await?;
            let (root, layout) = (job.info().root, job.info().layout);
            let source = client.for_dataset(Some(&job.info().dataset)).tables(root, layout);
            let cache = PartCache::new(super::PART_CACHE_BYTES);
            let EpochReceipt { receipt, acked_by, .. } = job.receipt(epoch).await?;
            Ok(Evidence {
                receipt,
                acked_by,
                ledger: Some(ledger_of(&job.ledger(epoch).await?)?),
                version: Some(Version::open(source, root, layout, cache).await?),
            })
        })
    }

    /// Returns the content hash of every sample of the version, by the ordinal of its first entry.
    async fn contents(&self) -> Result<BTreeMap<u64, Hash>, Failure> {
        let Some(version) = &self.version else { return Ok(BTreeMap::new()) };
        let mut out: BTreeMap<u64, Vec<Hash>> = BTreeMap::new();
        let (mut at, mut open) = (0, None::<String>);
        for i in 0..version.index().parts().len() {
            let part = version.part(i).await?;
            for row in 0..part.len() {
                let e = part.entry(row);
                match e.sample {
                    SampleRef::None => continue,
                    SampleRef::Keyed(key) if open.as_deref() == Some(key) => {}
                    SampleRef::Single | SampleRef::Keyed(_) => {
                        at = part.first_ordinal() + row as u64;
                        open = if let SampleRef::Keyed(k) = e.sample { Some(k.to_owned()) } else { None };
                    }
                }
                out.entry(at).or_default().extend(e.hash);
            }
        }
        Ok(out.into_iter().map(|(ordinal, hashes)| (ordinal, content(&hashes))).collect())
    }

    /// Returns a sentence for each rank that several processes acknowledged, or that named none.
    fn loaders(&self) -> Vec<String> {
        let mut told = Vec::new();
        for row in &self.acked_by {
            let of_rank = self.acked_by.iter().filter(|other| other.rank == row.rank).count();
            let (rank, entries) = (row.rank, count(row.entries, "sample"));
            match &row.loader {
                None => {
                    told.push(format!(
                        "rank {rank}: clients that do not name themselves acknowledged {entries}"
                    ));
                }
                Some(loader) if of_rank > 1 => {
                    told.push(format!("rank {rank}: {loader} acknowledged {entries}"));
                }
                Some(_) => {}
            }
        }
        let known: u64 = self.acked_by.iter().map(|row| row.entries).sum();
        let rest = self.receipt.delivered.saturating_sub(known);
        if rest > 0 && !self.acked_by.is_empty() && self.acked_by.len() < LOADERS_LISTED_MAX {
            told.push(format!(
                "{} acknowledged before the server started, or part of a state that was loaded",
                count(rest, "sample")
            ));
        }
        told
    }

    /// Returns what is wrong with the receipt itself, even if the logs agree with it.
    ///
    /// Checks only a plan of all samples of a known version. The tail of the epoch bounds the dropped
    /// samples, if the ledger is known. Without padding, the value of the receipt is the value of all samples
    /// that were not dropped.
    fn receipt_fault(&self, contents: &BTreeMap<u64, Hash>) -> Option<String> {
        let r = &self.receipt;
        let plan = Plan::all(contents.len() as u64).ok().filter(|p| p.hash() == r.plan)?;
        let dropped: BTreeSet<u32> = r.dropped.iter().copied().collect();
        // A replay drops and pads the same samples as the epoch that it replays.
        if let Some(ledger) = self.ledger.as_ref().filter(|l| l.header.order != "replay") {
            let world = ledger.header.world;
            let tail = plan.entries() - world.delivered(plan.entries()).min(plan.entries());
            // A change of the world shares the rest again, which can leave out fewer samples than ranks.
            let anew = ledger.events.iter().filter_map(|e| match e {
                Event::World { world } => Some(*world),
                Event::Resume { .. } | Event::Rollback { .. } => Some(world),
                _ => None,
            });
            let most = tail + anew.clone().map(|world| u64::from(world.ranks)).max().unwrap_or(0);
            if dropped.len() as u64 > most {
                return Some(format!(
                    "it says that it dropped {}, but the tail of a step has at most {most}",
                    count(dropped.len(), "sample")
                ));
            }
            if r.padded > 0 && anew.chain([world]).all(|world| world.tail != Tail::Pad) {
                return Some(format!(
                    "it says that a step is padded with {}, but no world of the epoch pads",
                    count(r.padded, "entry")
                ));
            }
        }
        if r.padded > 0 {
            return None;
        }
        let mut value = LtHash::default();
        for (_, (&ordinal, &content)) in (0..).zip(contents).filter(|(e, _)| !dropped.contains(e)) {
            value.add(r.root, &Delivery { ordinal, content, copy: 0 });
        }
        let (is, should) = (r.value.digest(), value.digest());
        (is != should)
            .then(|| format!("its value is {is}, but the plan without the dropped samples has {should}"))
    }
}

/// One difference.
#[derive(Serialize)]
struct Row {
    what: &'static str,
    /// The path of the sample's first entry, if the version is known.
    path: Option<String>,
    ordinal: Option<u64>,
    why: String,
}

/// The result of the check.
#[derive(Serialize)]
struct Verdict {
    agrees: bool,
    root: String,
    epoch: u64,
    deliveries: u64,
    left_out: u64,
    receipt: Counts,
    differs: Vec<Row>,
    more: usize,
}

#[derive(Serialize)]
struct Counts {
    delivered: u64,
    redelivered: u64,
    dropped: usize,
    padded: u32,
}

/// Names samples by their paths.
struct SampleNames<'a> {
    files: &'a [PathBuf],
    ordinals: Vec<u64>,
    evidence: &'a Evidence,
    /// Whether the plan is every sample once, so that the number of an entry is the number of a sample.
    all: bool,
}

impl SampleNames<'_> {
    fn at(&self, w: LogPosition) -> String {
        format!("{}:{}", self.files[w.file].display(), w.line)
    }

    async fn path(&self, ordinal: u64) -> Result<Option<String>, Failure> {
        let Some(version) = &self.evidence.version else { return Ok(None) };
        Ok(version.entry(ordinal).await?.map(|found| found.entry().path.replace('\0', "/")))
    }

    async fn row(&self, differs: &Discrepancy) -> Result<Row, Failure> {
        let (what, ordinal, why) = match *differs {
            Discrepancy::Doubled { ordinal, copy, first, again } => {
                let why =
                    format!("copy {copy} was consumed twice: {} and {}", self.at(first), self.at(again));
                ("doubled", Some(ordinal), why)
            }
            Discrepancy::Altered { ordinal, at, is, should: Some(should) } => {
                let why =
                    format!("{}: its bytes hash to {is}, those of the version to {should}", self.at(at));
                ("altered", Some(ordinal), why)
            }
            Discrepancy::Altered { ordinal, at, .. } => {
                ("unknown", Some(ordinal), format!("{}: the version has no such sample", self.at(at)))
            }
            Discrepancy::Missing { ordinal } => {
                ("missing", Some(ordinal), "it was delivered, but no consumption log has it".to_owned())
            }
            Discrepancy::Unrecorded { entry, rank, lease, place } => {
                let ordinal = self.ordinals.get(entry as usize).copied().filter(|_| self.all);
                let why = format!(
                    "entry {entry}: rank {rank} acknowledged it (lease {lease}, place {place}), \
                     but no consumption log has it"
                );
                ("missing", ordinal, why)
            }
        };
        let path = match ordinal {
            Some(ordinal) => self.path(ordinal).await?,
            None => None,
        };
        Ok(Row { what, path, ordinal, why })
    }
}

fn verify(ctx: &Context, files: &[PathBuf], proof: &Proof) -> Result<Exit, Failure> {
    let mut all = Vec::new();
    for path in files {
        let text = fs::read_to_string(path).map_err(|e| Failure::io(path.display(), &e))?;
        let notes =
            ConsumptionLog::parse(&text).map_err(|e| Failure::new(format!("{}: {e}", path.display())))?;
        all.push(notes);
    }
    let evidence = match (&proof.receipt, &proof.job, proof.epoch) {
        (Some(path), ..) => Evidence::saved(ctx, path, proof)?,
        (None, Some(job), Some(epoch)) => Evidence::served(ctx, job, epoch)?,
        (None, ..) => {
            return Err(
                Failure::usage("no receipt was given").hint("give --job and --epoch, or a saved --receipt")
            );
        }
    };
    let receipt = &evidence.receipt;
    for (path, notes) in files.iter().zip(&all) {
        if (notes.root, notes.epoch) != (receipt.root, receipt.epoch) {
            return Err(Failure::new(format!(
                "{}: a log of epoch {} of version {}, but the receipt is of epoch {} of {}",
                path.display(),
                notes.epoch,
                notes.root,
                receipt.epoch,
                receipt.root
            )));
        }
    }
    let check = Check::new(&all, evidence.ledger.as_ref());
    let contents = ctx.rt.block_on(evidence.contents())?;
    let (mut rows, mut more) = (Vec::new(), 0);
    if !check.agrees(receipt) {
        (rows, more) = ctx.rt.block_on(explain(files, &evidence, &check, contents.clone()))?;
    }
    rows.extend(evidence.receipt_fault(&contents).map(|why| plain("receipt", why)));
    let agrees = rows.is_empty();
    let verdict = Verdict {
        agrees,
        root: receipt.root.to_string(),
        epoch: receipt.epoch,
        deliveries: check.deliveries(),
        left_out: check.left_out(),
        receipt: Counts {
            delivered: receipt.delivered,
            redelivered: receipt.redelivered,
            dropped: receipt.dropped.len(),
            padded: receipt.padded,
        },
        differs: rows,
        more,
    };
    ctx.out.result(&verdict, |w| print(w, &verdict))?;
    Ok(if agrees { Exit::Ok } else { Exit::Failed })
}

fn plain(what: &'static str, why: String) -> Row {
    Row { what, path: None, ordinal: None, why }
}

async fn explain(
    files: &[PathBuf],
    evidence: &Evidence,
    check: &Check,
    contents: BTreeMap<u64, Hash>,
) -> Result<(Vec<Row>, usize), Failure> {
    let receipt = &evidence.receipt;
    let whole = Plan::all(contents.len() as u64).is_ok_and(|p| p.hash() == receipt.plan);
    let dropped: BTreeSet<u64> = receipt.dropped.iter().map(|&e| e.into()).collect();
    let mut found = check.discrepancies(&contents, Some(&dropped).filter(|_| whole));
    if evidence.version.is_none() {
        // Without the version, every content looks altered.
        found.retain(|d| !matches!(d, Discrepancy::Altered { .. }));
    }
    let ordinals = contents.into_keys().collect();
    let names = SampleNames { files, ordinals, evidence, all: whole };
    let mut rows = Vec::new();
    for differs in found.iter().take(LISTED_MAX) {
        rows.push(names.row(differs).await?);
    }
    if check.deliveries() != receipt.delivered {
        let why = format!(
            "the logs have {}, but {} delivered",
            count(check.deliveries(), "sample"),
            receipt.delivered
        );
        rows.push(plain("count", why));
    } else if rows.is_empty() {
        let why = format!(
            "the logs have the value {}, the receipt {}: a sample was altered or replaced by another",
            check.value().digest(),
            receipt.value.digest()
        );
        rows.push(plain("value", why));
    }
    rows.extend(evidence.loaders().into_iter().map(|why| plain("loader", why)));
    Ok((rows, found.len().saturating_sub(LISTED_MAX)))
}

fn print(w: &mut dyn io::Write, v: &Verdict) -> io::Result<()> {
    for row in &v.differs {
        let name = row.path.clone().or_else(|| row.ordinal.map(|o| format!("ordinal {o}")));
        writeln!(w, "{}\t{}\t{}", row.what, name.unwrap_or_else(|| "-".to_owned()), row.why)?;
    }
    if v.more > 0 {
        writeln!(w, "and {} more", v.more)?;
    }
    let word = if v.agrees { "agrees" } else { "differs" };
    write!(w, "{word}: epoch {} of {}, {}", v.epoch, v.root, count(v.deliveries, "delivery"))?;
    if v.left_out > 0 {
        write!(w, ", {} consumed but not acknowledged, and delivered again", v.left_out)?;
    }
    writeln!(w)
}

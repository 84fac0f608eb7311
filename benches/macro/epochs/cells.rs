//! The cells: jobs, their speeds and what befalls them, as cases of the simulator. The real run follows the very case,
//! so that both play the same.

use fletch_sim::{Case, Origin, Reader};

/// Samples of a lease, and of a step, unless the cell says otherwise.
pub const LEASE: u32 = 64;
/// Samples' worth of units in a block of a strict order on a pack (docs/EPOCHS.md).
const STRICT_BLOCK_UNITS: usize = 64;
/// What a job of the server holds: leases on their way and in its hands (`consumer`), decisions ahead of a grant, and how
/// many of these one may overtake (ADR 10).
const LEASES_HELD: usize = 4;
const AHEAD: usize = 32;
const OVERTAKE: usize = 4;

/// One cell.
pub struct Cell {
    /// Who reads what and when. A rate of 1 is one sample a second; the run goes faster.
    pub case: Case,
    /// Whether the pack is read, or the plain objects.
    pub packed: bool,
    /// The origin's bytes a second, where the cell is about time; then all jobs together want `demand` times as much.
    pub link: Option<Link>,
}

/// An origin that is slower than its readers.
#[derive(Clone, Copy)]
pub struct Link {
    /// Bytes a second of all its answers together.
    pub bytes_per_s: f64,
    /// What jobs could compute, relative to it.
    pub demand: f64,
}

/// The dataset as cells see it.
pub struct Dataset<'a> {
    /// How many samples.
    pub samples: usize,
    /// Of a sample, on average.
    pub sample_bytes: u64,
    /// Samples in each chunk of the pack.
    pub pack: &'a [u32],
    /// Epochs of the slowest job before anything is counted, and that are counted.
    pub warm: f64,
    /// See `warm`.
    pub epochs: f64,
}

impl Cell {
    /// Leases of so many samples, job by job, over and over.
    fn with_leases(mut self, samples: &[u32]) -> Self {
        for (job, &lease) in self.case.jobs.iter_mut().zip(samples.iter().cycle()) {
            job.lease = lease;
            job.leased = Some(lease as usize * LEASES_HELD);
        }
        self
    }
}

impl Dataset<'_> {
    fn cell(&self, name: &str, packed: bool, staggered: bool, cache: f64, rates: &[f64]) -> Cell {
        let mut case = Case::plain(name, self.samples, 1, cache, staggered, rates, 1);
        if packed {
            case.units = self.pack.to_vec();
        }
        let slowest = rates.iter().copied().fold(f64::MAX, f64::min);
        let epoch = self.samples as f64 / slowest;
        (case.warm, case.end) = (self.warm * epoch, (self.warm + self.epochs) * epoch);
        (case.ahead, case.overtake) = (AHEAD, OVERTAKE);
        Cell { case, packed, link: None }.with_leases(&[LEASE])
    }

    /// A job that does not do as the others, among four that are staggered; times in epochs.
    fn one_apart(&self, name: &str, how: impl FnOnce(&mut Case, f64)) -> Cell {
        let mut cell = self.cell(name, true, true, 0.2, &[1.0; 4]);
        let epoch = self.samples as f64;
        how(&mut cell.case, epoch);
        cell
    }

    /// All of them.
    pub fn cells(&self) -> Vec<Cell> {
        let near = [0.97, 0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.1];
        let mut all = Vec::new();
        for (cache, percent) in [(0.05, 5), (0.2, 20), (0.5, 50), (0.8, 80), (0.95, 95)] {
            all.push(self.cell(&format!("1 job, indexed, {percent} %"), false, false, cache, &[1.0]));
            all.push(self.cell(&format!("1 job, packed, {percent} %"), true, false, cache, &[1.0]));
        }
        all.extend([
            self.cell("3 equal, indexed, 20 %", false, false, 0.2, &[1.0; 3]),
            self.cell("3 equal staggered, packed, 10 %", true, true, 0.1, &[1.0; 3]),
            self.cell("4 equal staggered, packed, 5 %", true, true, 0.05, &[1.0; 4]),
            self.cell("4 equal staggered, packed, 20 %", true, true, 0.2, &[1.0; 4]),
            self.cell("1/1.02/.98/1.05 staggered, packed, 5 %", true, true, 0.05, &[1.0, 1.02, 0.98, 1.05]),
            self.cell("1/1.3/2/4, packed, 20 %", true, false, 0.2, &[1.0, 1.3, 2.0, 4.0]),
            self.cell("8 at .97-1.1 staggered, packed, 20 %", true, true, 0.2, &near),
            self.one_apart("4 staggered, one paused, packed, 20 %", |case, epoch| {
                let from = case.warm + 0.3 * epoch;
                case.jobs[1].pauses = vec![(from, from + 0.4 * epoch)];
            }),
            self.one_apart("4 staggered, one late, packed, 20 %", |case, epoch| {
                case.jobs[3].start = case.warm + 0.4 * epoch;
            }),
            self.one_apart("4 staggered, one leaves, packed, 20 %", |case, epoch| {
                case.jobs[2].end = Some(case.warm + 0.6 * epoch);
            }),
            self.one_apart("4 staggered, one strict, packed, 20 %", |case, _| {
                let units = case.units.len().max(1);
                let block = case.samples() * STRICT_BLOCK_UNITS / units;
                case.jobs[3].reader = Reader::Strict;
                case.jobs[3].block = u32::try_from(block).unwrap_or(u32::MAX);
            }),
            self.cell("12 staggered, packed, 20 %, leases of 64", true, true, 0.2, &[1.0; 12]),
            self.cell("12 staggered, packed, 20 %, leases of 32, 96 and 128", true, true, 0.2, &[1.0; 12])
                .with_leases(&[32, 96, 128]),
            self.paced(),
        ]);
        all
    }

    /// One job that computes twice as fast as its origin sends, with half of its data in the cache.
    fn paced(&self) -> Cell {
        let mut cell = self.cell("1 job, packed, 50 %, half as fast an origin", true, false, 0.5, &[1.0]);
        let link = Link { bytes_per_s: 100e6, demand: 2.0 };
        let samples_per_s = link.bytes_per_s * link.demand / self.sample_bytes as f64;
        cell.case.origin = Some(Origin::new(1.0 / link.demand, 0.025 * samples_per_s));
        cell.link = Some(link);
        cell
    }
}

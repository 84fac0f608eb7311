//! The cells: jobs, their speeds, pauses and ends, as cases of the simulator. The real run follows the same
//! case, so both play the same.

use fletch_sim::{Case, Origin, Reader};

/// Samples of a lease, and of a step, unless the cell says otherwise.
pub const LEASE: u32 = 64;
/// Samples' worth of units in a block of a strict order on a pack (docs/EPOCHS.md).
const STRICT_BLOCK_UNITS: usize = 64;
/// Leases that a job holds: under way to it, and not acknowledged yet (`consumer`).
const LEASES_HELD: usize = 4;
/// Picks that the server decides ahead of a grant (R15 of docs/SWEEP.md).
const AHEAD: usize = 32;
/// Older picks that one whose bytes are cached may overtake (R15, ADR 10).
const OVERTAKE: usize = 4;

/// A case that is simulated and also played on a real server.
pub struct Cell {
    /// The jobs and their times. A rate of 1 is one sample a second; the real run goes faster.
    pub case: Case,
    /// Whether jobs read the pack; else they read the plain objects.
    pub packed: bool,
    /// The slow origin of a cell that measures time.
    pub link: Option<Link>,
}

/// An origin that is slower than its readers.
#[derive(Clone, Copy)]
pub struct Link {
    /// Bandwidth over all answers, in bytes a second.
    pub bytes_per_s: f64,
    /// Demand of all jobs together, as a multiple of `bytes_per_s`.
    pub demand: f64,
}

/// The dataset's shape, from which the cells are made.
pub struct Dataset<'a> {
    /// Number of samples.
    pub samples: usize,
    /// Mean bytes of a sample.
    pub sample_bytes: u64,
    /// Samples in each chunk of the pack.
    pub pack: &'a [u32],
    /// Epochs of the slowest job that are not counted.
    pub warm: f64,
    /// Epochs of the slowest job that are counted.
    pub epochs: f64,
}

impl Cell {
    /// Sets the lease sizes of the jobs: `samples` in turn.
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

    /// Makes a cell of four staggered jobs, of which `how` changes one. It gets the length of an epoch in
    /// seconds.
    fn one_apart(&self, name: &str, how: impl FnOnce(&mut Case, f64)) -> Cell {
        let mut cell = self.cell(name, true, true, 0.2, &[1.0; 4]);
        let epoch = self.samples as f64;
        how(&mut cell.case, epoch);
        cell
    }

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

    /// Makes the cell of one job that computes twice as fast as its origin sends, with half of its data
    /// cached.
    fn paced(&self) -> Cell {
        let mut cell = self.cell("1 job, packed, 50 %, half as fast an origin", true, false, 0.5, &[1.0]);
        let link = Link { bytes_per_s: 100e6, demand: 2.0 };
        let samples_per_s = link.bytes_per_s * link.demand / self.sample_bytes as f64;
        cell.case.origin = Some(Origin::new(1.0 / link.demand, 0.025 * samples_per_s));
        cell.link = Some(link);
        cell
    }
}

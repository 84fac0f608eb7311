//! The servers of a case: which server keeps which unit, which are down, and what the others know of that.
//!
//! `fletch_core::cluster::placement` places the units, and the residencies of all servers are merged, as in a
//! real cluster. A unit whose owner is full or down goes to the next server in its ranking. The grant knows
//! where each unit is, and the lease says so. A server that is down has lost everything. Until the news has
//! spread, the others believe that its units are still there.

use crate::{Case, links::ServerLink};
use fletch_core::{
    Domain, Hash, StoreKey,
    cluster::{Member, Placement},
    plan::Bits,
    residency::Residency,
};

/// The holder of a unit that no server has.
const NOBODY: u16 = u16::MAX;

/// A change of a server's state.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Change {
    /// The server goes down and loses its units.
    Dies(usize),
    /// The server is back, empty.
    Returns(usize),
    /// The others learn whether the server is up.
    Announced(usize),
}

impl Change {
    /// Returns the rank among changes of one moment, least first: a server returns before it goes down again,
    /// and changes come before their announcement.
    fn rank(self) -> u8 {
        match self {
            Change::Returns(_) => 0,
            Change::Dies(_) => 1,
            Change::Announced(_) => 2,
        }
    }
}

/// The changes since the last look.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// Units lost with their server.
    pub vanished: Vec<u32>,
    /// Whether a change was announced, so that residencies must be compared.
    pub announced: bool,
}

/// The servers of a case and the units that they hold.
#[derive(Debug)]
pub(crate) struct Servers {
    sizes: Vec<u32>,
    capacity: Vec<u64>,
    used: Vec<u64>,
    links: Vec<ServerLink>,
    up: Vec<bool>,
    believed: Vec<bool>,
    /// Of each unit: the servers by preference. Empty for a lone server.
    ranking: Vec<Vec<u16>>,
    /// Of each unit: the server that holds it, or [`NOBODY`].
    holder: Vec<u16>,
    /// Changes to come, latest first.
    changes: Vec<(f64, Change)>,
}

impl Servers {
    pub(crate) fn new(case: &Case) -> Self {
        let weights: Vec<f64> =
            if case.servers.is_empty() { vec![1.0] } else { case.servers.iter().map(|s| s.weight).collect() };
        let sum: f64 = weights.iter().sum();
        let member = |(i, &weight): (usize, &f64)| Member { id: i.to_string(), weight };
        let placement = Placement::new(weights.iter().enumerate().map(member));
        let domain = Domain::default_domain();
        let rank = |unit: u64| -> Vec<u16> {
            let hash = Hash::of(&[case.seed.to_le_bytes(), unit.to_le_bytes()].concat());
            let key = StoreKey { domain: domain.clone(), hash };
            placement.owners(&key, weights.len()).iter().filter_map(|m| m.id.parse().ok()).collect()
        };
        let mut changes: Vec<(f64, Change)> = Vec::new();
        for (i, s) in case.servers.iter().enumerate() {
            for &(from, to) in &s.gone {
                for (at, change) in [(from, Change::Dies(i)), (to, Change::Returns(i))] {
                    changes.extend([(at, change), (at + case.news, Change::Announced(i))]);
                }
            }
        }
        changes.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.rank().cmp(&a.1.rank())));
        let total = case.capacity();
        Servers {
            sizes: case.units.clone(),
            // A lone server has the whole capacity, whatever rounding does.
            capacity: weights.iter().map(|w| (total as f64 * (w / sum)) as u64).collect(),
            used: vec![0; weights.len()],
            links: vec![ServerLink::new(case.network); weights.len()],
            up: vec![true; weights.len()],
            believed: vec![true; weights.len()],
            ranking: if weights.len() > 1 {
                (0..case.units.len() as u64).map(rank).collect()
            } else {
                Vec::new()
            },
            holder: vec![NOBODY; case.units.len()],
            changes,
        }
    }

    /// Returns the first server in a unit's ranking that is up and has `room`.
    fn owner(&self, unit: u32, room: u64) -> Option<usize> {
        let fits = |&s: &usize| self.up[s] && self.used[s] + room <= self.capacity[s];
        match self.ranking.get(unit as usize) {
            None => Some(0).filter(fits),
            Some(ranked) => ranked.iter().map(|&s| usize::from(s)).find(fits),
        }
    }

    /// Returns the capacity of the servers that are believed to be up. Each of several leaves room for a
    /// unit, so that one of them can always take the next.
    pub(crate) fn capacity(&self) -> u64 {
        let spare = match self.capacity.len() {
            1 => 0,
            _ => self.sizes.iter().copied().max().map_or(0, u64::from),
        };
        let believed = self.capacity.iter().zip(&self.believed).filter(|x| *x.1);
        believed.map(|(c, _)| c.saturating_sub(spare)).sum()
    }

    /// Applies all changes until `now` and returns them.
    pub(crate) fn until(&mut self, now: f64) -> News {
        let mut news = News::default();
        while let Some(&(at, change)) = self.changes.last().filter(|c| c.0 <= now) {
            debug_assert!(at <= now);
            self.changes.pop();
            match change {
                Change::Dies(s) => {
                    self.up[s] = false;
                    self.used[s] = 0;
                    for (unit, holder) in (0u32..).zip(&mut self.holder) {
                        if usize::from(*holder) == s {
                            *holder = NOBODY;
                            news.vanished.push(unit);
                        }
                    }
                }
                Change::Returns(s) => self.up[s] = true,
                Change::Announced(s) => {
                    self.believed[s] = self.up[s];
                    news.announced = true;
                }
            }
        }
        news
    }

    /// Places a unit. Returns `false` when no server has room.
    pub(crate) fn keep(&mut self, unit: u32) -> bool {
        let size = u64::from(self.sizes[unit as usize]);
        let Some(s) = self.owner(unit, size) else { return false };
        self.used[s] += size;
        self.holder[unit as usize] = u16::try_from(s).unwrap_or(NOBODY);
        true
    }

    /// Removes a unit from its holder. Returns whether it had one.
    pub(crate) fn release(&mut self, unit: u32) -> bool {
        let holder = std::mem::replace(&mut self.holder[unit as usize], NOBODY);
        if holder == NOBODY {
            return false;
        }
        self.used[usize::from(holder)] -= u64::from(self.sizes[unit as usize]);
        true
    }

    /// Returns the time at which a sample of a unit reaches its job.
    pub(crate) fn deliver(&mut self, unit: u32, now: f64, there: f64) -> f64 {
        let s = match self.holder[unit as usize] {
            NOBODY => self.owner(unit, 0).unwrap_or(0),
            s => usize::from(s),
        };
        self.links[s].deliver(now, there)
    }

    /// Returns the merged residency of all servers.
    pub(crate) fn residency(&self) -> Residency {
        let units = self.holder.len() as u64;
        let one = |s: usize| {
            let mut held = Bits::zeros(units);
            for (u, &h) in (0u64..).zip(&self.holder) {
                if usize::from(h) == s {
                    held.set(u);
                }
            }
            Residency::new(1, held)
        };
        let all = (0..self.up.len()).map(one).reduce(|a, b| a.merged(&b));
        all.unwrap_or_else(|| Residency::new(0, Bits::zeros(units)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When all news has spread, the others' beliefs are right, in whatever order a case lists the spans.
    #[test]
    fn what_happened_is_known_rightly() {
        for news in [0.0, 1.0] {
            let mut case = Case::plain("x", 8, 4, 0.5, false, &[1.0], 1);
            case.news = news;
            let server = |gone: &[(f64, f64)]| crate::Server { weight: 1.0, gone: gone.to_vec() };
            case.servers = vec![server(&[]), server(&[(20.0, 30.0), (10.0, 20.0)])];
            let mut servers = Servers::new(&case);
            for (now, up) in [(9.0, true), (11.0, false), (21.0, false), (31.0, true)] {
                servers.until(now);
                assert_eq!((servers.up[1], servers.believed[1]), (up, up), "news {news}, at {now}");
            }
            assert!(servers.changes.is_empty());
        }
    }
}

//! Clusters in which jobs come and go: the server's decisions against other ways to divide a cache.

use fletch_sim::cluster::{Arm, mixes::MIXES, table::Row};

/// Differences of mean slowdowns that count as none.
const TIE: f64 = 0.02;

/// `FLETCH_CLUSTER_SEEDS` sets the number of seeds; `make accept-clusters` sets 8.
fn seeds() -> u64 {
    std::env::var("FLETCH_CLUSTER_SEEDS").map_or(1, |n| n.parse().expect("a number"))
}

/// The seeds are not those by which the constants of decisions were chosen.
const FIRST_SEED: u64 = 5000;

#[test]
fn no_other_division_slows_jobs_down_less() {
    println!("{}", fletch_sim::cluster::table::HEADING);
    let mixes = if seeds() == 1 { &MIXES[..3] } else { &MIXES[..] };
    for mix in mixes {
        let play = |arm| Row::play(mix, arm, FIRST_SEED, seeds()).expect("a cluster");
        let rows = Arm::ALL.map(play);
        rows.iter().for_each(|row| println!("{}", row.line()));
        let slowdown = |arm: Arm| rows.iter().find(|r| r.arm == arm).expect("a row").outcome.slowdown;
        for arm in [Arm::Lru, Arm::Equal, Arm::Demand, Arm::Quiver] {
            assert!(slowdown(Arm::Fletch) <= slowdown(arm) + TIE, "{} under {arm:?}", mix.name);
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_cluster() {
    let play = || Row::play(&MIXES[0], Arm::Fletch, 7, 1).expect("a cluster");
    assert_eq!(play(), play());
}

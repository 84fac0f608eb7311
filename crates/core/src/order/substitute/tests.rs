use super::*;
use crate::{
    Hash, Root,
    order::{
        certificate::{Shuffle, chance},
        plan::Plan,
    },
};
use proptest::prelude::*;
use std::collections::BTreeSet;

mod echoes;
mod few;

fn key(seed: u64) -> OrderKey {
    OrderKey::new(Root(Hash::of(b"root")), Hash::of(b"plan"), seed, 0)
}

fn shape(sizes: &[u32]) -> Arc<Shape> {
    let unit_of: Vec<u32> = (0u32..).zip(sizes).flat_map(|(u, &g)| vec![u; g as usize]).collect();
    Arc::new(Shape::new(&unit_of, sizes.iter().map(|&g| u64::from(g) * 1000).collect()).expect("shape"))
}

/// A store that does what it is told, and knows when an order makes no sense (I3).
#[derive(Clone)]
struct Store {
    here: BTreeSet<u32>,
    bytes: u64,
    capacity: u64,
    shape: Arc<Shape>,
    loads: u64,
}

impl Store {
    fn new(shape: &Arc<Shape>, capacity: u64) -> Self {
        Store { here: BTreeSet::new(), bytes: 0, capacity, shape: shape.clone(), loads: 0 }
    }

    fn obey(&mut self, acts: &mut Vec<Act>) {
        for act in acts.drain(..) {
            match act {
                Act::Evict(u) => {
                    assert!(self.here.remove(&u), "evicted what is not here");
                    self.bytes -= self.shape.bytes(u);
                }
                Act::Load(u) => {
                    assert!(self.here.insert(u), "loaded what is here");
                    self.bytes += self.shape.bytes(u);
                    self.loads += 1;
                    assert!(self.bytes <= self.capacity, "I3: {} of {}", self.bytes, self.capacity);
                }
            }
        }
    }

    fn residency(&self) -> Residency {
        let mut r = Residency::new(0, Bits::zeros(self.shape.units() as u64));
        self.here.iter().for_each(|&u| r.put(u, true));
        r
    }
}

fn sit(fly: &mut Flywheel, plan: &Plan) -> SeatId {
    let laid = Laid::new(plan, fly.shape()).expect("same version");
    let spots = u64::from(laid.spots());
    let seat = fly.join(laid);
    fly.begin(seat, Bits::ones(spots));
    seat
}

#[derive(Debug, Clone)]
enum Op {
    Draw { job: usize, n: usize },
    GiveBack { job: usize, k: usize },
    Join { part: u64 },
    Leave { job: usize },
    Lose { unit: u32 },
    Capacity { part: u64 },
    GiveWay { unit: u32 },
    Reconcile,
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0usize..4, 1usize..60).prop_map(|(job, n)| Op::Draw { job, n }),
        2 => (0usize..4, any::<usize>()).prop_map(|(job, k)| Op::GiveBack { job, k }),
        1 => (1u64..4).prop_map(|part| Op::Join { part }),
        1 => (0usize..4).prop_map(|job| Op::Leave { job }),
        1 => any::<u32>().prop_map(|unit| Op::Lose { unit }),
        1 => (0u64..9).prop_map(|part| Op::Capacity { part }),
        2 => any::<u32>().prop_map(|unit| Op::GiveWay { unit }),
        1 => Just(Op::Reconcile),
        1 => Just(Op::Restart),
    ]
}

struct Job {
    seat: SeatId,
    plan: Plan,
    out: Vec<u32>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// I1, I2, I3 under any interleaving: what each job was handed and not given back, with what
    /// is left, is its plan; and each epoch ends.
    #[test]
    fn exactly_once_whatever_happens(sizes in proptest::collection::vec(1u32..9, 4..60), part in 0u64..9, seed: u64, ops in proptest::collection::vec(op(), 1..80)) {
        let shape = shape(&sizes);
        let n = shape.samples() as u64;
        let mut store = Store::new(&shape, shape.total_bytes() * part / 8);
        let mut fly = Flywheel::new(shape.clone(), store.capacity, &key(seed), Knobs { rotate: 0.2, ..Knobs::default() });
        let mut jobs: Vec<Job> = Vec::new();
        let mut acts = Vec::new();
        let join = |fly: &mut Flywheel, every: u64| {
            let plan = Plan::subset(n, (0..n).filter(|s| s % every == 0)).expect("not empty");
            Job { seat: sit(fly, &plan), plan, out: Vec::new() }
        };
        jobs.push(join(&mut fly, 1));
        for op in ops {
            match op {
                Op::Draw { job, n } => if let Some(job) = jobs.get_mut(job) {
                    for _ in 0..n {
                        let left = fly.left(job.seat);
                        let pick = fly.next(job.seat, &mut acts);
                        prop_assert_eq!(pick.is_some(), left > 0, "I2");
                        let Some(pick) = pick else { break };
                        store.obey(&mut acts);
                        prop_assert_eq!(fly.laid(job.seat).unit(pick.spot), pick.unit);
                        prop_assert_eq!(pick.how == How::Range, !fly.holds(pick.unit));
                        prop_assert!(!job.out.contains(&pick.spot), "I1");
                        job.out.push(pick.spot);
                    }
                },
                Op::GiveBack { job, k } => if let Some(job) = jobs.get_mut(job) && !job.out.is_empty() {
                    let spot = job.out.swap_remove(k % job.out.len());
                    fly.give_back(job.seat, spot);
                },
                Op::Join { part } => if jobs.len() < 4 { jobs.push(join(&mut fly, part)); },
                Op::Leave { job } => if job < jobs.len() { let job = jobs.remove(job); fly.leave(job.seat); },
                Op::Lose { unit } => {
                    let unit = unit % sizes.len() as u32;
                    fly.lost(unit);
                    if store.here.remove(&unit) { store.bytes -= shape.bytes(unit); }
                }
                Op::Capacity { part } => {
                    let capacity = shape.total_bytes() * part / 8;
                    fly.set_capacity(capacity, &mut acts);
                    store.obey(&mut acts);
                    store.capacity = capacity;
                    prop_assert!(store.bytes <= capacity, "I3");
                }
                Op::GiveWay { unit } => {
                    let unit = unit % sizes.len() as u32;
                    let before = store.bytes;
                    let gave = fly.give_way(unit, store.capacity, &mut acts);
                    prop_assert!(gave || acts.is_empty() || !fly.holds(unit));
                    store.obey(&mut acts);
                    prop_assert_eq!(gave, gave && store.here.contains(&unit), "what it is done for stays");
                    prop_assert!(!gave || store.bytes <= before.max(store.capacity - shape.bytes(unit)));
                }
                Op::Reconcile => fly.reconcile(&store.residency(), fly.standing().swept_bytes),
                Op::Restart => {
                    // The process dies; the cache and what each job still needs survive.
                    let mut again = Flywheel::new(shape.clone(), store.capacity, &key(seed ^ 1), Knobs::default());
                    again.adopt(&store.residency(), &mut acts);
                    store.obey(&mut acts);
                    for job in &mut jobs {
                        let left = fly.left_spots(job.seat).clone();
                        let laid = Laid::new(&job.plan, &shape).expect("same version");
                        job.seat = again.join(laid);
                        again.begin(job.seat, left);
                    }
                    fly = again;
                }
            }
            for u in 0..sizes.len() as u32 { prop_assert_eq!(fly.holds(u), store.here.contains(&u)); }
            let standing = fly.standing();
            prop_assert_eq!(standing.window_bytes + standing.reserve_bytes, store.bytes);
        }
        for job in &mut jobs {
            while let Some(pick) = fly.next(job.seat, &mut acts) { store.obey(&mut acts); job.out.push(pick.spot); }
            job.out.sort_unstable();
            prop_assert_eq!(job.out.clone(), (0..job.plan.entries() as u32).collect::<Vec<_>>());
        }
    }
}

#[test]
fn the_same_calls_give_the_same_answers() {
    let run = || {
        let shape = shape(&[4; 100]);
        let mut fly = Flywheel::new(shape, 40_000, &key(1), Knobs::default());
        let plan = Plan::all(400).expect("plan");
        let (a, b) = (sit(&mut fly, &plan), sit(&mut fly, &plan));
        let mut acts = Vec::new();
        let picks: Vec<_> = (0..300).map(|i| fly.next(if i % 3 == 0 { a } else { b }, &mut acts)).collect();
        (picks, acts)
    };
    assert_eq!(run(), run());
}

#[test]
fn an_empty_cache_is_a_plain_shuffle() {
    let shape = shape(&[1; 500]);
    let mut fly = Flywheel::new(shape, 0, &key(5), Knobs::default());
    let seat = sit(&mut fly, &Plan::all(500).expect("plan"));
    let mut acts = Vec::new();
    let order: Vec<u32> = std::iter::from_fn(|| fly.next(seat, &mut acts)).map(|p| p.spot).collect();
    assert!(acts.is_empty() && order.len() == 500);
    // No trend and no neighbours: correlation of position and value, and of neighbours.
    let corr = |x: &[f64], y: &[f64]| {
        let n = x.len() as f64;
        let (mx, my) = (x.iter().sum::<f64>() / n, y.iter().sum::<f64>() / n);
        let c: f64 = x.iter().zip(y).map(|(a, b)| (a - mx) * (b - my)).sum();
        let v = |z: &[f64], m: f64| z.iter().map(|a| (a - m).powi(2)).sum::<f64>();
        c / (v(x, mx) * v(y, my)).sqrt()
    };
    let v: Vec<f64> = order.iter().map(|&s| f64::from(s)).collect();
    let at: Vec<f64> = (0..500).map(f64::from).collect();
    assert!(corr(&at, &v).abs() < 0.2 && corr(&v[1..], &v[..499]).abs() < 0.2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Without a cache nothing is near anything because of how it is stored, whatever the units: neighbours of one unit
    /// are as frequent as chance has it.
    #[test]
    fn with_an_empty_cache_units_leave_no_trace(sizes in proptest::collection::vec(1u32..17, 100..200), seed: u64) {
        let shape = shape(&sizes);
        let n = shape.samples();
        let mut fly = Flywheel::new(shape.clone(), 0, &key(seed), Knobs::default());
        let seat = sit(&mut fly, &Plan::all(n as u64).expect("plan"));
        let (mut acts, mut shuffle, mut seen) = (Vec::new(), Shuffle::default(), BTreeSet::new());
        while let Some(pick) = fly.next(seat, &mut acts) {
            prop_assert!(pick.how == How::Range && seen.insert(pick.spot));
            shuffle.see(pick.unit);
        }
        prop_assert!(acts.is_empty() && seen.len() == n);
        let said = shuffle.certificate(chance(sizes.iter().map(|&g| u64::from(g))));
        prop_assert!(said.near10 > 0.5 && said.near10 < 1.5, "{:?}", said);
    }

    /// A job that stands still while another runs: when it comes back it must not drag the sweep
    /// around the ring, nor make the other wait.
    #[test]
    fn a_straggler_never_makes_the_sweep_jump(seed: u64, part in 5u64..30, stops in 0u32..1600, lead in 500u32..3100, quick in 1u32..5) {
        let shape = shape(&[8; 400]);
        let mut fly = Flywheel::new(shape.clone(), shape.total_bytes() / part, &key(seed), Knobs::default());
        let plan = Plan::all(3200).expect("plan");
        let (a, b) = (sit(&mut fly, &plan), sit(&mut fly, &plan));
        let mut acts = Vec::new();
        for i in 0..lead {
            fly.next(a, &mut acts).expect("left");
            if i < stops {
                fly.next(b, &mut acts).expect("left");
            }
        }
        while fly.left(b) > 0 {
            let before = fly.pointer;
            fly.next(b, &mut acts).expect("left");
            let n = fly.ring.len();
            // One pick may move the sweep several times, each at most .5 % of the ring past a taken unit.
            let jump = fly.solid.gaps_in(before.min(n), fly.pointer, n);
            prop_assert!(jump <= 16, "the sweep moved {} of 400 places in one pick", jump);
            for _ in 0..quick {
                if fly.left(a) > 0 {
                    prop_assert!(fly.next(a, &mut acts).is_some(), "the other never waits");
                }
            }
        }
    }
}

proptest! {
    /// A cache that loses units by itself and is seen late: every epoch is exact, nobody is kept waiting, and
    /// once the news has come both agree.
    #[test]
    fn late_news_lose_nothing(seed: u64, part in 1u64..8, jobs in 1usize..4, late in 1usize..6, losses in proptest::collection::vec((0usize..400, 0u32..40), 0..60)) {
        let shape = shape(&[5; 40]);
        let capacity = shape.total_bytes() * part / 8;
        let mut fly = Flywheel::new(shape.clone(), capacity, &key(seed), Knobs::default());
        let plan = Plan::all(200).expect("plan");
        let seats: Vec<SeatId> = (0..jobs).map(|_| sit(&mut fly, &plan)).collect();
        let mut store = Store::new(&shape, capacity);
        let mut news = VecDeque::new();
        let mut acts = Vec::new();
        for epoch in 0..2 {
            let mut got = vec![BTreeSet::new(); jobs];
            for draw in 0..200 {
                for (seat, got) in seats.iter().zip(&mut got) {
                    prop_assert!(got.insert(fly.next(*seat, &mut acts).expect("left").spot), "twice");
                }
                // What the cache lost meanwhile it neither drops nor has.
                for act in acts.drain(..) {
                    match act {
                        Act::Load(u) => drop(store.here.insert(u)),
                        Act::Evict(u) => drop(store.here.remove(&u)),
                    }
                }
                for loss in losses.iter().filter(|l| l.0 == epoch * 200 + draw) { store.here.remove(&loss.1); }
                if draw % 10 == 0 {
                    news.push_back((store.residency(), fly.standing().swept_bytes));
                    if news.len() > late && let Some((residency, as_of)) = news.pop_front() { fly.reconcile(&residency, as_of); }
                }
            }
            prop_assert!(seats.iter().all(|&s| fly.left(s) == 0), "epoch {}", epoch);
            seats.iter().for_each(|&s| fly.begin(s, Bits::ones(200)));
        }
        fly.reconcile(&store.residency(), fly.standing().swept_bytes);
        for u in 0..40 { prop_assert!(!fly.holds(u) || store.here.contains(&u), "unit {} is not here", u); }
    }
}

/// A store that keeps only four fifths of what it was said to have: the sweep finds out, plans with that much, and plans with
/// all of it again once it is told. A store that refuses everything takes no more than half from it.
#[test]
fn a_store_that_keeps_less_makes_a_smaller_sweep() {
    let shape = shape(&[8; 400]);
    let (granted, real) = (shape.total_bytes() / 5, shape.total_bytes() * 4 / 25);
    let mut fly = Flywheel::new(shape.clone(), granted, &key(6), Knobs::default());
    let seat = sit(&mut fly, &Plan::all(3200).expect("plan"));
    let (mut store, mut acts, mut refused) = (Store::new(&shape, real), Vec::new(), 0);
    for _ in 0..3200 {
        fly.next(seat, &mut acts).expect("left");
        for act in std::mem::take(&mut acts) {
            if let Act::Load(unit) = act {
                while store.bytes + shape.bytes(unit) > real {
                    refused += 1;
                    assert!(fly.give_way(unit, granted, &mut acts), "there is enough to drop");
                    store.obey(&mut acts);
                }
            }
            store.obey(&mut vec![act]);
        }
    }
    // Once for each unit that has no room; neither window nor reserve is full to the last byte.
    let standing = fly.standing();
    let planned = standing.window_bytes_max + standing.reserve_bytes_max;
    assert_eq!(refused, (granted - planned) / shape.bytes(0));
    assert!(planned >= real && planned <= real + shape.bytes(0), "{planned} of {real}");
    let unit = (0..400).find(|&u| fly.holds(u)).expect("something is here");
    while fly.give_way(unit, granted, &mut acts) {}
    let standing = fly.standing();
    let least = standing.window_bytes_max + standing.reserve_bytes_max;
    assert!(!fly.holds(unit) || least >= granted / 2 && least < granted / 2 + shape.bytes(0), "{least}");
    acts.clear();
    let before = fly.standing();
    assert!(!fly.give_way((0..400).find(|&u| !fly.holds(u)).expect("away"), granted, &mut acts));
    assert_eq!((before, acts.len()), (fly.standing(), 0), "for what is not wanted nothing leaves");
    fly.set_capacity(granted, &mut acts);
    let standing = fly.standing();
    assert_eq!(standing.window_bytes_max + standing.reserve_bytes_max, granted);
}

/// With a residency snapshot that is many draws old, epochs stay exact and little more is read.
#[test]
fn an_old_snapshot_costs_only_a_little() {
    let shape = shape(&[8; 400]);
    let mut fly = Flywheel::new(shape.clone(), shape.total_bytes() / 5, &key(3), Knobs::default());
    let plan = Plan::all(3200).expect("plan");
    let mut store = Store::new(&shape, shape.total_bytes() / 5);
    let seats = [sit(&mut fly, &plan), sit(&mut fly, &plan)];
    let mut acts = Vec::new();
    let mut old = (store.residency(), 0);
    let mut draws = 0u64;
    for epoch in 0..4 {
        for i in 0..3200 {
            for s in seats {
                fly.next(s, &mut acts).expect("left");
                draws += 1;
            }
            store.obey(&mut acts);
            if i % 500 == 0 {
                fly.reconcile(&old.0, old.1);
                for u in (0..400).filter(|&u| !fly.holds(u)) {
                    if store.here.remove(&u) {
                        store.bytes -= shape.bytes(u);
                    }
                }
                old = (store.residency(), fly.standing().swept_bytes);
            }
        }
        assert!(seats.iter().all(|&s| fly.left(s) == 0), "epoch {epoch}");
        seats.iter().for_each(|&s| fly.begin(s, Bits::ones(3200)));
    }
    let ratio = (store.loads * 8) as f64 / draws as f64;
    assert!(ratio < 0.5, "backend per delivered {ratio}: 2 jobs, a fifth cached, bound 0.4");
}

#[test]
fn a_feed_serves_what_is_here_first_and_loses_nothing() {
    let shape = shape(&[4; 50]);
    let mut fly = Flywheel::new(shape, 40_000, &key(4), Knobs::default());
    let seat = sit(&mut fly, &Plan::all(200).expect("plan"));
    let (mut feed, mut acts, mut out) = (Feed::default(), Vec::new(), BTreeSet::new());
    for i in 0..100u32 {
        feed.fill(&mut fly, seat, 16, &mut acts, |_| {});
        let odd = |p: &Pick| p.unit % 2 == 1;
        let any = feed.planned().any(odd);
        let pick = feed.next(&fly, usize::MAX, odd).expect("planned");
        assert!(!any || odd(&pick), "draw {i}");
        assert!(out.insert(pick.spot));
    }
    feed.give_back(&mut fly, seat);
    assert_eq!((feed.len(), fly.left(seat)), (0, 100));
    while let Some(p) = fly.next(seat, &mut acts) {
        assert!(out.insert(p.spot));
    }
    assert_eq!(out.len(), 200);
}

/// Two epochs of a lone job have little to do with each other: each goes round another ring, and positions correlate by -.15
/// or so (what was read last is still here, and comes first). With the same ring it was .5 and more.
#[test]
fn a_job_alone_goes_round_another_ring_each_epoch() {
    let shape = shape(&[16; 400]);
    let n = 400 * 16u64;
    let mut fly = Flywheel::new(Arc::clone(&shape), shape.total_bytes() / 10, &key(7), Knobs::default());
    let laid = Laid::new(&Plan::all(n).expect("plan"), &shape).expect("same version");
    let seat = fly.join(laid);
    let (mut before, mut acts) = (Vec::<f64>::new(), Vec::new());
    for epoch in 0..3 {
        fly.begin(seat, Bits::ones(n));
        let mut at = vec![f64::NAN; n as usize];
        for position in 0..n {
            let pick = fly.next(seat, &mut acts).expect("spots are left");
            at[pick.spot as usize] = position as f64;
        }
        let mean = (n - 1) as f64 / 2.0;
        let var: f64 = at.iter().map(|x| (x - mean).powi(2)).sum();
        let both: f64 = before.iter().zip(&at).map(|(a, b)| (a - mean) * (b - mean)).sum();
        assert!(epoch == 0 || (both / var).abs() < 0.25, "epoch {epoch}: {:.3}", both / var);
        before = at;
    }
}

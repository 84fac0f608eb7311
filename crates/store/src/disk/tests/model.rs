//! The tier against a map: whatever is done to it, a get is right or a miss, and while nothing
//! has to leave it is a hit.

use super::*;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Do {
    Put(u8, u16),
    PutGroup(Vec<(u8, u16)>),
    Get(u8),
    Evict(u8),
    Pin(u8),
    Share(u8),
    Reap,
    Scrub,
    Reopen,
    /// Without `close`, and with the last slab cut at a fraction of its length.
    Crash(Option<u8>),
}

fn steps() -> impl Strategy<Value = Vec<Do>> {
    let one = prop_oneof![
        12 => (any::<u8>(), any::<u16>()).prop_map(|(n, l)| Do::Put(n, l)),
        3 => prop::collection::vec(any::<(u8, u16)>(), 0..40).prop_map(Do::PutGroup),
        6 => any::<u8>().prop_map(Do::Get),
        3 => any::<u8>().prop_map(Do::Evict),
        1 => any::<u8>().prop_map(Do::Pin),
        1 => any::<u8>().prop_map(Do::Share),
        1 => Just(Do::Reap),
        1 => Just(Do::Scrub),
        1 => Just(Do::Reopen),
        1 => any::<Option<u8>>().prop_map(Do::Crash),
    ];
    prop::collection::vec(one, 1..120)
}

/// Cuts the newest slab file; which keeps the first bytes of it.
fn cut(dir: &Path, fraction: u8) {
    if let Some(last) = slab_files(dir).last() {
        let f = fs::OpenOptions::new().write(true).open(last).expect("a slab");
        let len = f.metadata().expect("its length").len();
        f.set_len(len * u64::from(fraction) / 255).expect("cut");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_get_is_right_or_a_miss(
        steps in steps(),
        policy in prop_oneof![Just(Policy::Fletch), Just(Policy::Lru), Just(Policy::Pin)],
    ) {
        let dir = tempfile::tempdir().expect("a directory");
        let size = 16 << 20;
        let mut tier = Arc::new(open(dir.path(), size, policy).0);
        // What must be there, and what may be.
        let mut sure: BTreeMap<u8, Verified> = BTreeMap::new();
        let mut all: BTreeMap<u8, Verified> = BTreeMap::new();
        for step in steps {
            match step {
                Do::Put(n, len) => {
                    // The same number always means the same chunk.
                    let c = all.entry(n).or_insert_with(|| chunk(u64::from(n), len as usize)).clone();
                    let dataset = DatasetId(u64::from(n % 2));
                    let stored = tier.put(&key(&c), dataset, &c).expect("no error");
                    if let Stored::Yes | Stored::Already = stored {
                        sure.insert(n, c);
                    }
                }
                Do::PutGroup(group) => {
                    let chunk = |(n, len): (u8, u16)| {
                        let made = || chunk(u64::from(n), len as usize);
                        (n, all.entry(n).or_insert_with(made).clone())
                    };
                    let group: Vec<(u8, Verified)> = group.into_iter().map(chunk).collect();
                    let keys: Vec<StoreKey> = group.iter().map(|(_, c)| key(c)).collect();
                    let (mut newcomers, mut written) = (Vec::new(), Vec::new());
                    for ((n, chunk), key) in group.iter().zip(&keys) {
                        let dataset = DatasetId(u64::from(n % 2));
                        let len = u32::try_from(chunk.bytes().len()).expect("short");
                        match tier.reserve_share(key, dataset, len) {
                            Ok(reserved) => {
                                newcomers.push(Newcomer { key, dataset, chunk, reserved });
                                written.push((*n, chunk.clone()));
                            }
                            Err(Stored::Already) => prop_assert!(tier.contains(key)),
                            Err(_) => {}
                        }
                    }
                    let stored = tier.put_group(newcomers).expect("no error");
                    prop_assert_eq!(stored.len(), written.len());
                    for ((n, chunk), stored) in written.into_iter().zip(stored) {
                        if let Stored::Yes | Stored::Already = stored {
                            prop_assert!(tier.contains(&key(&chunk)));
                            sure.insert(n, chunk);
                        }
                    }
                }
                Do::Get(n) => {
                    if let Some(c) = all.get(&n) {
                        let (got, wrong) = read(&tier, &key(c));
                        prop_assert!(!wrong);
                        prop_assert!(got.is_some() || !sure.contains_key(&n), "{n} is lost");
                    }
                }
                Do::Evict(n) => {
                    if let Some(c) = all.get(&n)
                        && tier.evict(&key(c))
                    {
                        sure.remove(&n);
                        prop_assert!(!tier.contains(&key(c)));
                    }
                }
                Do::Pin(n) => {
                    if let Some(c) = all.get(&n) {
                        prop_assert_eq!(tier.pin(&[key(c)]) == 1, tier.contains(&key(c)));
                    }
                }
                Do::Share(s) => {
                    let share = tier.capacity() * u64::from(s) / 512;
                    if tier.set_shares(&[(DatasetId(0), share), (DatasetId(1), share)]) > 0 {
                        sure.retain(|_, c| tier.contains(&key(c)));
                    }
                }
                Do::Reap => drop(tier.reap(u64::MAX).expect("reaped")),
                Do::Scrub => prop_assert_eq!(tier.scrub_next(1 << 20).expect("scrubbed").bad, 0),
                Do::Reopen => {
                    tier.close().expect("closed");
                    drop(tier);
                    let (opened, found) = open(dir.path(), size, policy);
                    tier = Arc::new(opened);
                    prop_assert_eq!((found.walked, found.rebuilt), (0, false));
                }
                Do::Crash(fraction) => {
                    drop(tier);
                    if let Some(f) = fraction {
                        cut(dir.path(), f);
                        sure.clear();
                    }
                    tier = Arc::new(open(dir.path(), size, policy).0);
                }
            }
            tier.read_index().check();
        }
        for (n, c) in &all {
            let (got, wrong) = read(&tier, &key(c));
            prop_assert!(!wrong);
            prop_assert!(got.is_some() || !sure.contains_key(n), "{} is lost", n);
        }
        prop_assert!(tier.usage().du <= size);
    }
}

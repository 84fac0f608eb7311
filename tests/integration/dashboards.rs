fn main() {}
#[test]
fn x() {}

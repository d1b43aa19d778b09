SELECT min(at), max(at) FROM log WHERE place % (1 << 40) BETWEEN :first AND :last AND type LIKE 'Message%';

#!/bin/busybox sh
# The guest's first process: drivers, the host's files as / (read-only), an exchange folder at /mnt, then the command there.
busybox=/bin/busybox
for place in proc:/proc sysfs:/sys devtmpfs:/dev; do
    $busybox mount -t ${place%%:*} none ${place#*:}
done
while read -r module; do $busybox insmod /modules/$module; done < /modules/order
shared=trans=virtio,version=9p2000.L,msize=512000
$busybox mount -t 9p -o $shared,ro,cache=loose host /host
$busybox mount -t 9p -o $shared exchange /host/mnt
for folder in proc sys dev; do $busybox mount -o move /$folder /host/$folder; done
$busybox mkdir /host/dev/shm /host/dev/pts
$busybox mount -t devpts none /host/dev/pts
$busybox mount -t tmpfs none /host/dev/shm
$busybox mount -t tmpfs none /host/run
$busybox mount -t cgroup2 none /host/sys/fs/cgroup
$busybox ip link set lo up
$busybox chroot /host /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run /bin/sh /mnt/command-$LAB_GUEST
echo $? > /host/mnt/status-$LAB_GUEST
$busybox sync
$busybox poweroff -f

#!/usr/bin/env bash
# The image that the end-to-end checks boot: Debian 12 with systemd as PID 1, unified cgroup v2, python3
# and sshd. It has no network but ssh from this machine, and no package source.
#   image.sh FOLDER    build it under FOLDER unless it is there, and print where it is
# Needs root and an apt that works. Exit 97, with one line that says why, where it cannot be made.
set -euo pipefail

cache=$(mkdir -p "$1" && cd "$1" && pwd)
suite=bookworm
flavour=cloud-amd64
tools=(qemu-system-x86 qemu-utils mmdebstrap busybox-static cpio e2fsprogs kmod openssh-client)
packages=(systemd systemd-sysv udev dbus libpam-systemd kmod procps util-linux openssh-server python3)

say() { printf 'e2e: %s\n' "$*" >&2; }
die() { say "$*"; exit 97; }
quiet() { # a command whose words are only wanted when it fails
  "$@" > "$cache/build.log" 2>&1 || { tail -n 3 "$cache/build.log" >&2; die "failed: $1 $2"; }
}

image=$cache/image-$({ cat "$0"; echo "$suite $flavour" "${packages[@]}"; } | sha256sum | cut -c1-16)
[ ! -e "$image/done" ] || { echo "$image"; exit 0; }

[ "$(uname -m)" = x86_64 ] || die "the image is for x86-64, this is $(uname -m)"
[ "$(id -u)" = 0 ] || die "building the image needs root"
command -v apt-get >/dev/null || die "building the image needs apt"

exec 9>"$cache/lock"
flock 9 # one build at a time
[ ! -e "$image/done" ] || { echo "$image"; exit 0; }
began=$SECONDS

missing=()
for tool in "${tools[@]}"; do dpkg -s "$tool" >/dev/null 2>&1 || missing+=("$tool"); done
if [ ${#missing[@]} -gt 0 ]; then
  say "installing ${missing[*]}"
  quiet apt-get update -qq
  DEBIAN_FRONTEND=noninteractive quiet apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi

work=$(mktemp -d "$cache/building.XXXXXX")
chmod 755 "$work"
trap 'rm -rf -- "${work:?}"' EXIT

sources=()
for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
  [ ! -s "$file" ] || sources+=("$file")
done
[ ${#sources[@]} -gt 0 ] || die "no Debian package source is configured here"
[ -n "$(apt-cache madison linux-image-$flavour 2>/dev/null)" ] || quiet apt-get update -qq
kernel=$(apt-cache depends linux-image-$flavour 2>/dev/null | awk '/Depends: linux-image-/{print $2; exit}')
[ -n "$kernel" ] || die "no package source here has linux-image-$flavour"

say "building the image (about a minute, once)"
# Unpacked, not installed: nothing of it is for this machine, and no initramfs is to be made.
mkdir "$work/debs"
(cd "$work/debs" && apt-get download -qq "$kernel" >/dev/null 2>&1) || die "cannot download $kernel"
quiet mmdebstrap --quiet --mode=root --variant=minbase \
  --include="$(IFS=,; echo "${packages[*]}")" \
  --aptopt='Apt::Install-Recommends "false"' \
  --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='Acquire::Check-Date "false"' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
  $suite "$work/root" "${sources[@]}"
root=$work/root
for deb in "$work"/debs/*.deb; do
  dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$root" --keep-directory-symlink
done
release=$(ls "$root/lib/modules")
depmod -b "$root" "$release"
mv "$root/boot/vmlinuz-$release" "$work/vmlinuz"
rm -rf "$root/boot" && mkdir "$root/boot"

rm -f "$root/etc/apt/sources.list" "$root"/etc/apt/sources.list.d/* "$root"/var/lib/apt/lists/*_*
echo e2e > "$root/etc/hostname"
printf '127.0.0.1 localhost e2e\n::1 localhost\n' > "$root/etc/hosts"
: > "$root/etc/fstab"
: > "$root/etc/resolv.conf"
echo 0123456789abcdef0123456789abcdef > "$root/etc/machine-id"

# ssh is the only way in, with a key that only this image knows.
ssh-keygen -q -t ed25519 -N '' -C e2e -f "$work/id"
mkdir -p -m 700 "$root/root/.ssh"
cp "$work/id.pub" "$root/root/.ssh/authorized_keys"
chroot "$root" passwd -d root >/dev/null
rm -f "$root"/etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f "$root/etc/ssh/ssh_host_ed25519_key"
printf 'UseDNS no\nHostKey /etc/ssh/ssh_host_ed25519_key\nPermitRootLogin prohibit-password\n' \
  > "$root/etc/ssh/sshd_config.d/e2e.conf"
printf '[Match]\nDriver=virtio_net\n[Network]\nAddress=10.0.2.15/24\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n' \
  > "$root/etc/systemd/network/10-user.network"

# What only costs time under emulation.
chroot "$root" systemctl -q enable systemd-networkd.service ssh.service 2>/dev/null
chroot "$root" systemctl -q mask systemd-networkd-wait-online.service apt-daily.timer \
  apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer \
  getty@tty1.service getty.target serial-getty@ttyS0.service systemd-update-utmp-runlevel.service

# No unit of this image is generated, and each daemon-reload would run them all.
for kind in system-generators system-environment-generators; do
  mkdir -p "$root/etc/systemd/$kind"
  for generator in "$root/usr/lib/systemd/$kind"/*; do
    ln -s /dev/null "$root/etc/systemd/$kind/$(basename "$generator")"
  done
done

# An initramfs of a static busybox and the few modules that find the root disk.
ird=$work/ird
mkdir -p "$ird"/{bin,m,proc,sys,dev,new}
cp /bin/busybox "$ird/bin/busybox"
modprobe -d "$root" -S "$release" -D -a virtio_pci virtio_blk ext4 2>/dev/null \
  | awk '$1=="insmod" && !seen[$2]++ {print $2}' > "$work/modules"
while read -r module; do
  cp "$module" "$ird/m/"
  basename "$module" >> "$ird/m/order"
done < "$work/modules"
cat > "$ird/init" <<'INIT'
#!/bin/busybox sh
B=/bin/busybox
$B mount -t devtmpfs d /dev; $B mount -t proc p /proc; $B mount -t sysfs s /sys
while read m; do $B insmod /m/$m; done < /m/order
n=0; while [ ! -b /dev/vda ] && [ $n -lt 200 ]; do $B usleep 50000; n=$((n+1)); done
$B mount -t ext4 -o rw,noatime /dev/vda /new || { echo "no root disk"; $B poweroff -f; }
$B umount /proc; $B umount /sys; $B mount -t devtmpfs d /new/dev
exec $B switch_root /new /sbin/init
INIT
chmod 755 "$ird/init"
(cd "$ird" && find . | LC_ALL=C sort | cpio -o -H newc --quiet -R 0:0) > "$work/initrd"

# An ext4 image, made without mounting anything.
quiet mke2fs -q -t ext4 -O ^has_journal,^metadata_csum -m 0 -L root -d "$root" "$work/root.img" 3G
mkdir "$work/made"
mv "$work"/{vmlinuz,initrd,root.img,id} "$work/made/"
chmod 600 "$work/made/id"
touch "$work/made/done"
rm -rf "$cache"/image-*
mv "$work/made" "$image"
say "image: $(du -sh "$image" | cut -f1), built in $((SECONDS - began)) s"
echo "$image"

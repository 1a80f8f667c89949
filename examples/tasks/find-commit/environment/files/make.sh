mkdir -p /app/repository && cd /app/repository
git init -q
git config user.name Author
git config user.email author@example.com
for commit in 'The start:A boat lay at the shore.' 'Evening comes:Somebody lit a lantern.' 'Night:The lantern went out.'; do
  echo "${commit#*:}" >> story.txt
  git add story.txt
  git commit -qm "${commit%%:*}"
done
